"""Any message comes back as it went; any bytes give a message or Undecodable, and nothing else."""

import random
from contextlib import suppress
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetwake.schemas.codec import Message, decode, encode
from jetwake.schemas.errors import InvalidRequest, Undecodable
from jetwake.schemas.json_schema import MESSAGES, type_tag
from jetwake.schemas.replies import AnyTerminal, Cancelled, CancelRequest, Reply, TokenChunk
from jetwake.schemas.requests import Sampling

from .examples import BY_TAG, ENDING
from .golden_file import read_golden
from .strategies import messages

SEED, MUTATIONS = 20_260, 10_000


@pytest.mark.parametrize("kind", MESSAGES, ids=type_tag)
def test_round_trip(kind: type[Message]) -> None:
    @settings(max_examples=100, deadline=None)
    @given(messages(kind))
    def comes_back(message: Message) -> None:
        data = encode(message)
        assert decode(data, kind) == message
        assert encode(decode(data, kind)) == data

    comes_back()


@pytest.mark.parametrize("trace", ["zz", "00-0-0-0", "00-" + "a" * 32 + "-" + "b" * 16 + "-0x"])
def test_a_trace_that_is_none_is_refused_where_it_is_read(trace: str) -> None:
    request = msgpack.unpackb(encode(BY_TAG["request"])) | {"trace": trace}
    with pytest.raises(Undecodable, match="trace"):
        decode(msgpack.packb(request), type(BY_TAG["request"]))


@pytest.mark.parametrize("tag", ["chunk", "finished", "failed", "cancelled", "expired"])
def test_reply_by_its_tag(tag: str) -> None:
    assert decode(encode(BY_TAG[tag]), Reply) == BY_TAG[tag]


def test_a_chunk_is_no_terminal() -> None:
    with pytest.raises(Undecodable, match="chunk"):
        decode(encode(BY_TAG["chunk"]), AnyTerminal)


def test_unknown_fields_are_ignored() -> None:
    fields = msgpack.unpackb(encode(BY_TAG["cancel"])) | {"invented_later": [1, {"a": None}]}
    assert decode(msgpack.packb(fields), CancelRequest) == BY_TAG["cancel"]


def test_missing_fields_take_their_default() -> None:
    assert decode(msgpack.packb({"type": "cancel", "request_id": "r"}), CancelRequest).reason == ""


@pytest.mark.parametrize(
    "change", [{"attempt": "2"}, {"attempt": 0}, {"tokens": "text"}, {"request_id": "a.b"}, {"request_id": "a\n"}, {"type": "x"}]
)
def test_wrong_fields_are_named(change: dict[str, Any]) -> None:
    fields = msgpack.unpackb(encode(BY_TAG["chunk"])) | change
    with pytest.raises(Undecodable, match=next(iter(change))):
        decode(msgpack.packb(fields), TokenChunk)


@pytest.mark.parametrize("sampling", [Sampling(seed=2**64), Sampling(stop_token_ids=[-(2**63) - 1]), Sampling(stop=["\ud800"])])
def test_what_the_wire_cannot_carry(sampling: Sampling) -> None:
    with pytest.raises(InvalidRequest, match="Sampling cannot be sent"):
        encode(sampling)


def test_messages_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Cancelled(**ENDING).attempt = 3  # type: ignore[misc]


def mutated(data: bytes, chance: random.Random, other: bytes) -> bytes:
    """A few random changes: bits, bytes, cuts, insertions, and pieces of another message."""
    mutant = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(mutant) + 1)
        match chance.randrange(5):
            case 0 if place < len(mutant):
                mutant[place] ^= 1 << chance.randrange(8)
            case 1 if place < len(mutant):
                mutant[place] = chance.randrange(256)
            case 2:
                del mutant[place : place + chance.randint(1, 8)]
            case 3:
                mutant[place:place] = chance.randbytes(chance.randint(1, 8))
            case _:
                start = chance.randrange(len(other))
                mutant[place : place + 16] = other[start : start + 16]
    return bytes(mutant)


def test_mutants_are_messages_or_undecodable() -> None:
    chance, golden = random.Random(SEED), read_golden()
    tags, kinds = sorted(golden), {type_tag(kind): kind for kind in MESSAGES}
    decoded = 0
    for _ in range(MUTATIONS):
        tag, other = chance.choice(tags), chance.choice(tags)
        data = mutated(golden[tag], chance, golden[other])
        for kind in (kinds[tag], Reply):
            try:
                message: Any = decode(data, kind)
            except Undecodable:
                continue
            decoded += 1
            assert isinstance(message, Message)
    assert decoded > MUTATIONS / 100


@settings(max_examples=500, deadline=None)
@given(
    st.one_of(
        st.binary(max_size=200),
        st.recursive(
            st.none() | st.integers(-5, 5) | st.text(max_size=5),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=5), inner),
            max_leaves=20,
        ).map(msgpack.packb),
    )
)
def test_any_bytes_are_a_message_or_undecodable(data: bytes) -> None:
    for kind in (*MESSAGES, Reply):
        with suppress(Undecodable):
            assert isinstance(decode(data, kind), Message)


@pytest.mark.parametrize(
    "data", [b"\x91" * 5000, b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xc7\x04\xff1234", b"\x81\x01\x02", b""]
)
def test_bytes_made_to_hurt(data: bytes) -> None:
    """Deep nesting, sizes of gigabytes, extension types, keys that are no text, nothing at all."""
    with pytest.raises(Undecodable):
        decode(data, TokenChunk)
