"""Lines of the output and error files, in OpenAI's format. Pure."""

import json
from typing import Any, Literal

from ...schemas.batches import LineResult
from ...schemas.subjects import batch_request

Unrun = Literal["batch_expired", "batch_cancelled"]
_WORDS: dict[Unrun, str] = {
    "batch_expired": "This request could not be executed before the completion window expired.",
    "batch_cancelled": "This request was not executed: the batch was cancelled.",
}


def result_line(result: LineResult) -> bytes:
    """A response, good or bad, with its line break. Its body goes in as it is, without being parsed."""
    before = json.dumps({"id": _line_id(result.batch_id, result.line), "custom_id": result.custom_id})[:-1]
    head = json.dumps({"status_code": result.status, "request_id": result.request_id})[:-1]
    body = result.body.replace(b"\n", b" ") if b"\n" in result.body else result.body  # only white space can be a raw line break
    return f'{before}, "response": {head}, "body": '.encode() + body + b'}, "error": null}\n'


def unrun_line(batch_id: str, line: int, custom_id: str, why: Unrun) -> bytes:
    fields: dict[str, Any] = {
        "id": _line_id(batch_id, line),
        "custom_id": custom_id,
        "response": None,
        "error": {"code": why, "message": _WORDS[why]},
    }
    return json.dumps(fields).encode() + b"\n"


def _line_id(batch_id: str, line: int) -> str:
    return f"batch_req_{batch_request(batch_id.removeprefix('batch_'), line)}"
