"""Token ids as bytes (little-endian unsigned 32-bit): what hashing, the wire and the engines exchange without a list of ints."""

import sys
from array import array
from collections.abc import Iterable

import numpy as np

from .errors import Undecodable

_U32 = "I" if array("I").itemsize == 4 else "L"


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Raises OverflowError for an id outside 0 to 2**32 - 1."""
    packed = array(_U32, token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(data: bytes) -> list[int]:
    """Raises Undecodable when the length is no multiple of four bytes."""
    if len(data) % 4:
        raise Undecodable(f"token bytes have length {len(data)}, not a multiple of 4")
    unpacked = array(_U32, data)
    if sys.byteorder == "big":
        unpacked.byteswap()
    return unpacked.tolist()


def largest_token(data: bytes) -> int:
    """The largest id; 0 where there is none. Without a list of ints, which takes a hundred times as long. Raises Undecodable."""
    if len(data) % 4:
        raise Undecodable(f"token bytes have length {len(data)}, not a multiple of 4")
    return int(np.frombuffer(data, dtype="<u4").max(initial=0))


def token_count(data: bytes) -> int:
    return len(data) // 4
