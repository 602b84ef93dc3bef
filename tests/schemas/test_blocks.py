"""The chained block hash: the same in every process, on every machine, in every language."""

import os
import subprocess
import sys

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from jetwake.schemas.blocks import block_count, block_hashes, root_hash
from jetwake.schemas.tokens import pack_tokens

TOKENS = pack_tokens(range(1, 13))

# python -c 'import xxhash; print(xxhash.xxh3_64_hexdigest(b"\x0f\0\0\0jetwake-block-1" + b"\x01\0\0\0m" + bytes(8)))'
ROOT_OF_M = 0x4EAF5E5E2AC42704
# The same with b"\x01\0\0\0l\x01\0\0\0s" for bytes(8) and b"\x02\0\0\0k1\x02\0\0\0k2" at the end.
ROOT_OF_ALL = 0xE3F04D5BF7F0E614
# python -c 'import struct, xxhash; print(xxhash.xxh3_64_hexdigest(struct.pack("<4I", 1, 2, 3, 4), seed=<ROOT_OF_M>))', and on with
# (5, 6, 7, 8) seeded by that, and (9, 10, 11, 12) seeded by that.
CHAIN = [0x00F878851246C469, 0x3008D8360B482153, 0xA738ED45617D8717]


def test_root_vectors() -> None:
    assert root_hash("m") == ROOT_OF_M
    assert root_hash("m", "l", "s", ["k1", "k2"]) == ROOT_OF_ALL


def test_chain_vectors() -> None:
    assert block_hashes(TOKENS, 4, root_hash("m")) == CHAIN


def test_root_as_written_down() -> None:
    """From the description alone, with another framing code."""
    identity = b"".join(len(part).to_bytes(4, "little") + part for part in [b"jetwake-block-1", "modèle".encode(), b"", b""])
    assert root_hash("modèle") == xxhash.xxh3_64(identity).intdigest()


@pytest.mark.parametrize(
    "other",
    [("n",), ("m", "l"), ("m", "", "s"), ("m", "s"), ("ml",), ("m", "", "", ["k"]), ("m", "", "", [""]), ("m", "", "", ["k", "k"])],
)
def test_roots_differ(other: tuple[str, ...]) -> None:
    assert root_hash(*other) != root_hash("m")  # type: ignore[arg-type]


def test_roots_do_not_run_together() -> None:
    roots = [root_hash("ab", "c"), root_hash("a", "bc"), root_hash("a", "b", "c"), root_hash("a", "", "bc"), root_hash("a", "", "b", ["c"])]
    assert len(set(roots)) == len(roots)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=50), st.integers(1, 8), st.integers(0, 2**64 - 1))
def test_only_full_blocks_and_only_the_prefix(token_ids: list[int], size: int, root: int) -> None:
    hashes = block_hashes(pack_tokens(token_ids), size, root)
    assert len(hashes) == len(token_ids) // size
    assert all(0 <= block_hash < 2**64 for block_hash in hashes)
    assert block_hashes(pack_tokens([*token_ids, 1, 2, 3]), size, root)[: len(hashes)] == hashes
    assert len(hashes) <= block_count(len(token_ids), size) <= len(hashes) + 1


def test_a_change_changes_everything_after_it() -> None:
    changed = block_hashes(pack_tokens([1, 2, 3, 4, 5, 6, 7, 0, 9, 10, 11, 12]), 4, root_hash("m"))
    assert [a == b for a, b in zip(changed, CHAIN, strict=True)] == [True, False, False]


@pytest.mark.parametrize("hash_seed", [None, "0", "1", "4294967295", "random"])
def test_the_same_in_every_process(hash_seed: str | None) -> None:
    code = "from jetwake.schemas.blocks import *; from jetwake.schemas.tokens import *; print(block_hashes(pack_tokens(range(1, 13)), 4, root_hash('m')))"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    environment |= {"PYTHONHASHSEED": hash_seed} if hash_seed else {}
    printed = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout
    assert printed.strip() == str(CHAIN)
