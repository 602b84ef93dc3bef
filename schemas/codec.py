"""The base of every message, and the one place where messages become bytes (msgpack) and bytes become messages.

Reads and writes nothing but its arguments. Promises: `decode(encode(m), type) == m`; bytes that are not a message of the
wanted kind raise `Undecodable`, whatever they are; unknown fields are ignored, so old and new processes run side by side.
"""

from functools import cache
from typing import Any, TypeVar, cast

import msgpack  # pyright: ignore[reportMissingTypeStubs]
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from .errors import InvalidRequest, Undecodable

M = TypeVar("M")


class Message(BaseModel):
    """Frozen and strict. Fields are str, int, float, bool, bytes, None, and lists or dicts of those; times end in `_ns`."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


def encode(message: Message) -> bytes:
    """The message as msgpack, a map from field name to value. Fields at their default are written too: a default may change.

    Raises InvalidRequest for what the wire cannot carry: integers over 64 bits, text that is not Unicode (lone surrogates).
    """
    try:
        return cast(bytes, msgpack.packb(message.model_dump(), use_bin_type=True))  # pyright: ignore[reportUnknownMemberType]
    except (OverflowError, UnicodeEncodeError) as error:
        raise InvalidRequest(f"a {type(message).__name__} cannot be sent: {error}") from error


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def decode(data: bytes, kind: type[M]) -> M:
    """The message in `data`. `kind` is a message class or a discriminated union of them. Raises Undecodable."""
    try:
        fields = cast(object, msgpack.unpackb(data, raw=False, strict_map_key=True))  # pyright: ignore[reportUnknownMemberType]
    except (ValueError, TypeError, RecursionError) as error:  # msgpack's own errors are all ValueErrors
        raise Undecodable(f"not msgpack: {error}") from error
    try:
        return _adapter(kind).validate_python(fields)
    except ValidationError as error:
        raise Undecodable(first_complaint(error)) from error


def first_complaint(error: ValidationError) -> str:
    """One readable line for a pydantic error: the first field that is wrong, and how."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{where}: {first['msg']}{more}" if where else f"{first['msg']}{more}"
