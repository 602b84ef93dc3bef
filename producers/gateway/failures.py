"""From errors to what an HTTP client is told: status, a stable code, and the body in the shape of the API it speaks. Pure."""

import json
import math
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal

from ...schemas.errors import (
    BusError,
    DeadlineExceeded,
    EngineRefused,
    InvalidRequest,
    JetwakeError,
    NotResumable,
    NoWorker,
    Overloaded,
    PayloadTooLarge,
    PromptTooLong,
    QuotaExceeded,
    RequestCancelled,
    RequestFailed,
    UnknownModel,
    UnknownRequest,
)

Shape = Literal["openai", "responses", "anthropic"]

_STATUS_BY_CODE: dict[str, HTTPStatus] = {
    InvalidRequest.code: HTTPStatus.BAD_REQUEST,
    PromptTooLong.code: HTTPStatus.BAD_REQUEST,
    EngineRefused.code: HTTPStatus.BAD_REQUEST,
    UnknownModel.code: HTTPStatus.NOT_FOUND,
    UnknownRequest.code: HTTPStatus.NOT_FOUND,
    NotResumable.code: HTTPStatus.CONFLICT,
    PayloadTooLarge.code: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    Overloaded.code: HTTPStatus.TOO_MANY_REQUESTS,
    QuotaExceeded.code: HTTPStatus.TOO_MANY_REQUESTS,
    NoWorker.code: HTTPStatus.SERVICE_UNAVAILABLE,
    DeadlineExceeded.code: HTTPStatus.GATEWAY_TIMEOUT,
    RequestCancelled.code: HTTPStatus.CONFLICT,
}
_CODE_BY_STATUS = {
    400: InvalidRequest.code,
    404: "not_found",
    413: PayloadTooLarge.code,
    422: InvalidRequest.code,
    429: Overloaded.code,
    501: "not_implemented",
}
_TRY_AGAIN = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
_TYPES: dict[int, tuple[str, str]] = {
    # status: the names OpenAI and Anthropic give to this kind of error
    400: ("invalid_request_error", "invalid_request_error"),
    401: ("authentication_error", "authentication_error"),
    403: ("permission_error", "permission_error"),
    404: ("not_found_error", "not_found_error"),
    409: ("conflict_error", "api_error"),
    413: ("request_too_large", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_error"),
    503: ("service_unavailable_error", "overloaded_error"),
    504: ("timeout_error", "timeout_error"),
}


@dataclass(frozen=True)
class Failure:
    """`code` is for machines, `text` for people. `param` names the field of the body that is wrong."""

    status: int
    code: str
    text: str
    param: str | None = None
    retry_after_s: float | None = None

    def headers(self) -> list[tuple[bytes, bytes]]:
        if self.retry_after_s is None:
            return []
        return [(b"retry-after", str(max(1, math.ceil(self.retry_after_s))).encode())]

    def body(self, shape: Shape) -> bytes:
        """The JSON of a response that consists of this failure."""
        return json.dumps(self._fields("openai" if shape == "responses" else shape)).encode()

    def event(self, shape: Shape) -> bytes:
        """The last event of a stream that had begun."""
        fields = self._fields(shape)
        if shape == "responses":
            fields |= {"type": "error", "code": self.code, "message": self.text, "param": self.param}
        return b"event: error\ndata: " + json.dumps(fields).encode() + b"\n\n"

    def _fields(self, shape: Shape) -> dict[str, Any]:
        openai, anthropic = _TYPES.get(self.status, ("server_error", "api_error"))
        if shape == "anthropic":
            return {"type": "error", "error": {"type": anthropic, "message": self.text}}
        return {"error": {"message": self.text, "type": openai, "param": self.param, "code": self.code}}


def failure_of(error: JetwakeError, retry_after_s: float) -> Failure:
    """`retry_after_s`: what a client waits at least where trying again can help."""
    code = error.reply_code if isinstance(error, RequestFailed) else error.code
    status = _STATUS_BY_CODE.get(code)
    if status is None:
        status = HTTPStatus.SERVICE_UNAVAILABLE if isinstance(error, BusError) else HTTPStatus.INTERNAL_SERVER_ERROR
    wait_s = None
    if status in _TRY_AGAIN:
        wait_s = max(retry_after_s, error.retry_after_s) if isinstance(error, Overloaded) else retry_after_s
    return Failure(int(status), code, str(error), param=getattr(error, "param", None), retry_after_s=wait_s)


def failure_in(status: int, body: bytes) -> Failure:
    """What vLLM's own error response says."""
    text, param = "", None
    try:
        fields = json.loads(body)
        error = fields.get("error") or {"message": fields["detail"]}
        text, param = str(error["message"]), error.get("param")
    except (ValueError, KeyError, TypeError, AttributeError):
        text = body.decode(errors="replace")[:500] or HTTPStatus(status).phrase
    code = _CODE_BY_STATUS.get(status, "refused" if status < 500 else "internal")
    if status == HTTPStatus.NOT_FOUND and param == "model":
        code = UnknownModel.code
    return Failure(status, code, text, param=param, retry_after_s=1.0 if status in _TRY_AGAIN else None)


def shape_of(path: str) -> Shape:
    """Which API a path belongs to."""
    if path.startswith("/v1/messages"):
        return "anthropic"
    return "responses" if path.startswith("/v1/responses") else "openai"
