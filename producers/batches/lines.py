"""The lines of a batch's input file: read, and checked before any is sent. Pure but for reading the file.

Promises: every problem names its line; at most `MAX_ERRORS` are listed, and then how many more there are; the file is never in memory as a whole.
"""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from ...schemas.batches import LineError
from .order import Trail, prompt_text, trail_of

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
MAX_ERRORS = 200
MAX_CUSTOM_ID_CHARACTERS = 512
_READ_BYTES = 1 << 20

BodyCheck = Callable[[str, dict[str, Any]], LineError | None]
"""What the OpenAI layer says to a body for an endpoint, as far as that can be said without sending it."""


@dataclass(frozen=True)
class BatchLimits:
    max_lines: int = 50_000
    max_file_bytes: int = 200 << 20


@dataclass(frozen=True, slots=True)
class Line:
    """`number` counts from 1; `offset` and `length_bytes` say where in the file it is."""

    number: int
    custom_id: str
    offset: int
    length_bytes: int
    trail: Trail


@dataclass
class Checked:
    """All good lines in the order of the file, or what is wrong."""

    lines: list[Line] = field(default_factory=list[Line])
    errors: list[LineError] = field(default_factory=list[LineError])
    refused: int = 0

    def refuse(self, error: LineError) -> None:
        self.refused += 1
        if len(self.errors) < MAX_ERRORS:
            self.errors.append(error)

    def all_errors(self) -> list[LineError]:
        if self.refused == len(self.errors):
            return self.errors
        more = f"{self.refused - len(self.errors)} more lines are refused; only the first {MAX_ERRORS} are listed"
        return [*self.errors, LineError(code="too_many_errors", message=more)]


class LineChecker:
    """Fed line by line; `checked` is complete after `finish`. `endpoint` empty: that of the first line. `knows`: whether a model is served here."""

    def __init__(self, endpoint: str, limits: BatchLimits, knows: Callable[[str], bool], check_body: BodyCheck) -> None:
        self.endpoint = endpoint
        self.model = ""
        self.checked = Checked()
        self._limits = limits
        self._knows = knows
        self._check_body = check_body
        self._line_of_id: dict[str, int] = {}
        self._number = 0
        self._seen = 0

    def take(self, offset: int, raw: bytes) -> None:
        self._number += 1
        if not raw.strip():
            return
        self._seen += 1
        if self._seen > self._limits.max_lines:
            return
        try:
            self.checked.lines.append(self._line(offset, raw))
        except _Refused as refused:
            self.checked.refuse(refused.error.model_copy(update={"line": self._number}))

    def finish(self) -> Checked:
        checked, limit = self.checked, self._limits.max_lines
        if self._seen == 0:
            checked.refuse(LineError(code="empty_file", message="the input file has no lines: each line is one request"))
        if self._seen > limit:
            text = f"the input file has {self._seen} lines; a batch takes at most {limit}: split it"
            checked.refuse(LineError(code="too_many_lines", message=text, line=limit + 1))
        return checked

    def _line(self, offset: int, raw: bytes) -> Line:
        fields = _object(raw)
        custom_id = self._custom_id(fields)
        method, url = fields.get("method", "POST"), fields.get("url")
        if method != "POST":
            raise _Refused("invalid_method", f"the method must be POST, not {method!r}", "method")
        if not isinstance(url, str) or url not in ENDPOINTS:
            raise _Refused("invalid_url", f"the url must be one of {', '.join(ENDPOINTS)}, not {url!r}", "url")
        self.endpoint = self.endpoint or url
        if url != self.endpoint:
            raise _Refused("mismatched_endpoint", f"the url is {url}, and the batch is for {self.endpoint}", "url")
        body = fields.get("body")
        if not isinstance(body, dict):
            raise _Refused("missing_required_parameter", "the body must be a JSON object: the request itself", "body")
        body = cast(dict[str, Any], body)
        self._check_model(body.get("model"))
        if body.get("stream"):
            raise _Refused("invalid_request", "a line of a batch cannot be streamed: leave stream out", "body.stream")
        problem = self._check_body(url, body)
        if problem is not None:
            param = f"body.{problem.param}" if problem.param else "body"
            raise _Refused(problem.code, problem.message, param)
        return Line(self._number, custom_id, offset, len(raw), trail_of(prompt_text(body)))

    def _custom_id(self, fields: dict[str, Any]) -> str:
        custom_id = fields.get("custom_id")
        if not isinstance(custom_id, str) or not custom_id:
            raise _Refused("missing_required_parameter", "a custom_id is needed: a text that no other line has", "custom_id")
        if len(custom_id) > MAX_CUSTOM_ID_CHARACTERS:
            raise _Refused(
                "invalid_custom_id", f"the custom_id has {len(custom_id)} characters, at most {MAX_CUSTOM_ID_CHARACTERS}", "custom_id"
            )
        first = self._line_of_id.setdefault(custom_id, self._number)
        if first != self._number:
            raise _Refused("duplicate_custom_id", f"the custom_id {custom_id[:80]!r} is that of line {first} already", "custom_id")
        return custom_id

    def _check_model(self, model: Any) -> None:
        if not isinstance(model, str) or not model:
            raise _Refused("missing_required_parameter", "the body needs a model", "body.model")
        if not self._knows(model):
            raise _Refused("model_not_found", f"no model is called {model!r} here", "body.model")
        self.model = self.model or model
        if model != self.model:
            raise _Refused(
                "mismatched_model", f"the model is {model!r}, and that of the lines before {self.model!r}: a batch has one", "body.model"
            )


class _Refused(Exception):
    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.error = LineError(code=code, message=message, param=param)


def _object(raw: bytes) -> dict[str, Any]:
    try:
        fields: Any = json.loads(raw)
    except ValueError as error:  # a UnicodeDecodeError is one too
        raise _Refused("invalid_json_line", f"the line is no JSON: {error}") from error
    except RecursionError:
        raise _Refused("invalid_json_line", "the line is nested too deep") from None
    if not isinstance(fields, dict):
        raise _Refused("invalid_json_line", "the line is no JSON object")
    return cast(dict[str, Any], fields)


def split_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Each line with where it begins. The last one needs no line break."""
    with path.open("rb", buffering=_READ_BYTES) as file:
        offset = 0
        for raw in file:
            yield offset, raw
            offset += len(raw)


class LineFile:
    """Gives the bodies of lines that were checked, one at a time."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def body(self, line: Line) -> bytes:
        fields: dict[str, Any] = json.loads(os.pread(self._descriptor, line.length_bytes, line.offset))
        return json.dumps(fields["body"]).encode()

    def close(self) -> None:
        os.close(self._descriptor)
