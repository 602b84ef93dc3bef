"""Reads and writes trace files, plain or gzipped: Mooncake JSONL, ShareGPT-like conversations and OpenAI batch files, told by content.

Mooncake (https://github.com/kvcache-ai/Mooncake, FAST25-release): a line for each request, `timestamp` in milliseconds, `input_length`,
`output_length`, and `hash_ids`, one for each 512 tokens. Two more keys are read and written where they are needed: `session_id`, and
`hash_tokens`, the tokens of a hash id where it is not 512. Times are kept to the microsecond; what was written is read back equal.
"""

import gzip
import json
import zlib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

from ...schemas.errors import SetupError
from .text_traces import TextOptions, read_batch, read_conversations
from .trace import Trace, TraceRequest

MOONCAKE_HASH_TOKENS = 512
EXPECTED = (
    'Mooncake lines ({"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]}), conversations '
    '({"conversations": [{"from": "human", "value": "..."}, ...]}, a list or lines), or OpenAI batch lines ({"custom_id": ..., "body": {...}})'
)

Numbered = tuple[str, dict[str, Any]]
"""Where it stands (file and line, for errors), and the object."""


def read_trace(path: Path, text: TextOptions | None = None) -> Trace:
    """`text`: for the formats that hold texts. Raises SetupError, with file and line, for what is no trace."""
    try:
        with _open_text(path) as file:
            objects = _objects(path, file)
            first = next(objects, None)
            if first is None:
                raise SetupError(f"{path} has no requests; expected {EXPECTED}")
            return _read(path.name, first, chain((first,), objects), text or TextOptions())
    except UnicodeDecodeError as error:
        raise SetupError(f"{path} is not UTF-8 text: {error}; expected {EXPECTED}") from error
    except (OSError, EOFError, zlib.error) as error:
        raise SetupError(f"cannot read {path}: {error}") from error


def write_trace(trace: Trace, path: Path) -> None:
    """As Mooncake JSONL, gzipped when the name ends in `.gz`. Raises SetupError when the file cannot be written."""
    try:
        with gzip.open(path, "wt", encoding="utf-8") if path.suffix == ".gz" else path.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(_mooncake_object(trace, request)) + "\n" for request in trace.requests)
    except OSError as error:
        raise SetupError(f"cannot write {path}: {error}") from error


def _mooncake_object(trace: Trace, request: TraceRequest) -> dict[str, Any]:
    whole_us = round(request.at_s * 1e6)
    line: dict[str, Any] = {
        "timestamp": whole_us / 1000 if whole_us % 1000 else whole_us // 1000,
        "input_length": request.input_tokens,
        "output_length": request.output_tokens,
        "hash_ids": request.content,
    }
    if request.session:
        line["session_id"] = request.session
    if trace.stretch_tokens != MOONCAKE_HASH_TOKENS:
        line["hash_tokens"] = trace.stretch_tokens
    return line


def _read(name: str, first: Numbered, objects: Iterator[Numbered], text: TextOptions) -> Trace:
    where, keys = first[0], first[1].keys()
    if "input_length" in keys or "hash_ids" in keys or "timestamp" in keys:
        return _read_mooncake(name, objects)
    if "conversations" in keys:
        return read_conversations(name, objects, text)
    if "custom_id" in keys or "body" in keys:
        return read_batch(name, objects, text)
    raise SetupError(f"{where}: no trace has only the keys {', '.join(sorted(keys)) or 'of an empty object'}; expected {EXPECTED}")


def _read_mooncake(name: str, objects: Iterator[Numbered]) -> Trace:
    requests, stretch_tokens = list[TraceRequest](), 0
    for where, line in objects:
        told = _integer(where, line, "hash_tokens", 1) if "hash_tokens" in line else MOONCAKE_HASH_TOKENS
        stretch_tokens = stretch_tokens or told
        if told != stretch_tokens:
            raise SetupError(f"{where}: hash_tokens is {told}, and {stretch_tokens} in the lines before; it must be one for the file")
        requests.append(_mooncake_request(where, line, stretch_tokens))
    return Trace(name, stretch_tokens, tuple(sorted(requests, key=lambda request: request.at_s)))


def _mooncake_request(where: str, line: dict[str, Any], stretch_tokens: int) -> TraceRequest:
    at_ms, content = line.get("timestamp"), line.get("hash_ids")
    input_tokens, output_tokens = _integer(where, line, "input_length", 1), _integer(where, line, "output_length", 0)
    if not isinstance(at_ms, int | float) or isinstance(at_ms, bool) or not 0 <= at_ms < float("inf"):
        raise SetupError(f"{where}: timestamp must be milliseconds from 0 on, not {at_ms!r}")
    if not isinstance(content, list) or not all(type(one) is int and -(2**63) <= one < 2**63 for one in content):
        raise SetupError(f"{where}: hash_ids must be a list of whole numbers of 64 bits")
    expected = -(-input_tokens // stretch_tokens)
    if len(content) != expected:
        raise SetupError(
            f"{where}: {input_tokens} input tokens have {expected} hash ids of {stretch_tokens} tokens, not {len(content)}; "
            'where a hash id is for another number of tokens, say so in each line: "hash_tokens": N'
        )
    return TraceRequest(round(at_ms * 1000) / 1e6, input_tokens, output_tokens, tuple(content), str(line.get("session_id", "")))


def _integer(where: str, line: dict[str, Any], key: str, least: int) -> int:
    value = line.get(key)
    if type(value) is not int or value < least:
        raise SetupError(f"{where}: {key} must be a whole number, at least {least}, not {value!r}")
    return value


def _open_text(path: Path) -> TextIO:
    with path.open("rb") as file:
        gzipped = file.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rt", encoding="utf-8") if gzipped else path.open(encoding="utf-8")


def _objects(path: Path, file: TextIO) -> Iterator[Numbered]:
    """Those of a JSON list, or of lines; empty lines are skipped."""
    lines = ((number, line) for number, line in enumerate(file, 1) if line.strip())
    first = next(lines, None)
    if first is None:
        return
    if first[1].lstrip().startswith("["):
        try:
            items = json.loads(first[1] + file.read())
        except json.JSONDecodeError as error:
            raise SetupError(f"{path}, line {first[0] - 1 + error.lineno}: not valid JSON ({error.msg}); expected {EXPECTED}") from error
        yield from ((f"{path}, item {place}", _object(f"{path}, item {place}", item)) for place, item in enumerate(items, 1))
        return
    for number, line in chain((first,), lines):
        where = f"{path}, line {number}"
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise SetupError(f"{where}: not valid JSON ({error.msg}); expected {EXPECTED}") from error
        yield where, _object(where, value)


def _object(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise SetupError(f"{where}: a {type(value).__name__} where a JSON object should be; expected {EXPECTED}")
    return value
