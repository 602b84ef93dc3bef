"""The chained block hash: the name of a KV block is a hash of every token up to its end, and of what else the KV depends on.

Version 1, language-neutral: `root = xxh3_64(framed identity)`, then `h[i] = xxh3_64(token bytes of block i, seed = h[i-1])`
with `h[-1] = root`. Identity is the ASCII text `jetwake-block-1`, then model, LoRA name and tenant salt, then the multimodal
keys in prompt order, each as UTF-8 behind its length (4 bytes, little-endian). Only full blocks have a hash.
Source: xxHash, https://github.com/Cyan4973/xxHash (XXH3, 64 bits, seeded).
"""

import sys
from array import array
from collections.abc import Iterable, Sequence
from struct import Struct

import xxhash

from .errors import Undecodable


def root_hash(model: str, lora: str = "", salt: str = "", multimodal_keys: Sequence[str] = ()) -> int:
    """The hash before the first block (64 bits): differs for whatever makes equal tokens have different KV."""
    parts = [part.encode() for part in ("jetwake-block-1", model, lora, salt, *multimodal_keys)]
    return xxhash.xxh3_64_intdigest(b"".join(len(part).to_bytes(4, "little") + part for part in parts))


def block_hashes(tokens: bytes, block_size_tokens: int, root: int) -> list[int]:
    """One 64-bit hash for each full block of `tokens` (little-endian unsigned 32-bit ids), in prompt order."""
    size = 4 * block_size_tokens
    blocks = Struct(f"{size}s" * (len(tokens) // size)).unpack_from(tokens)
    hashes = [root]
    hashes.extend(map(xxhash.xxh3_64_intdigest, blocks, hashes))  # each seeds the next; a loop in Python takes a third longer
    del hashes[0]
    return hashes


def pack_hashes(hashes: Iterable[int]) -> bytes:
    """Hashes as the wire carries them: little-endian unsigned 64-bit."""
    packed = array("Q", hashes)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_hashes(data: bytes) -> "array[int]":
    """Raises Undecodable when the length is no multiple of eight bytes."""
    if len(data) % 8:
        raise Undecodable(f"hash bytes have length {len(data)}, not a multiple of 8")
    unpacked = array("Q", data)
    if sys.byteorder == "big":
        unpacked.byteswap()
    return unpacked


def block_count(num_tokens: int, block_size_tokens: int) -> int:
    """Blocks needed to hold `num_tokens` tokens, the last one perhaps part full."""
    return -(-num_tokens // block_size_tokens)
