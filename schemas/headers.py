"""The headers of every message that carries a request: whom to tell when it cannot even be decoded, and the trace it belongs to."""

import re

from .requests import InferenceRequest
from .subjects import REQUEST_ID_HEADER, TRACEPARENT_HEADER, TRACESTATE_HEADER, reply_target

_TRACEPARENT = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def is_traceparent(text: str) -> bool:
    """Whether it is one of W3C trace context, version 00."""
    return _TRACEPARENT.fullmatch(text) is not None


def request_headers(request: InferenceRequest) -> dict[str, str]:
    headers = {REQUEST_ID_HEADER: reply_target(request.model, request.gateway, request.request_id)}
    if request.trace:
        headers[TRACEPARENT_HEADER] = request.trace
        if request.trace_state:
            headers[TRACESTATE_HEADER] = request.trace_state
    return headers
