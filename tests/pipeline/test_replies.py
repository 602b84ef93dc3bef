"""Whatever happens to replies on their way, the reader sees the terminal's tokens in order, then the terminal, then nothing."""

import asyncio
import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetwake.deploy.nats_server import NatsServer
from jetwake.pipeline import replies
from jetwake.pipeline.clock import WallClock
from jetwake.pipeline.connection import Bus
from jetwake.pipeline.merge import MAX_WAITING_CHUNKS, ReplyMerge
from jetwake.pipeline.publish import Publisher
from jetwake.pipeline.replies import ReplyInbox, ReplyStream
from jetwake.pipeline.settings import BrokerSettings
from jetwake.pipeline.terminals import Terminals
from jetwake.schemas import subjects
from jetwake.schemas.codec import encode
from jetwake.schemas.replies import AnyTerminal, Expired, Failed, Finished, PositionLogprobs, TokenChunk
from jetwake.schemas.requests import InferenceRequest
from jetwake.schemas.tokens import pack_tokens, unpack_tokens

from .harness import request


def logprob(token: int) -> PositionLogprobs:
    return PositionLogprobs(token_ids=[token], logprobs=[-0.5], ranks=[1])


def chunk(offset: int, *tokens: int, attempt: int = 1) -> TokenChunk:
    logprobs = [logprob(token) for token in tokens]
    return TokenChunk(request_id="r1", attempt=attempt, offset=offset, tokens=pack_tokens(tokens), logprobs=logprobs)


def finished(*tokens: int, attempt: int = 1) -> Finished:
    logprobs = [logprob(token) for token in tokens]
    return Finished(request_id="r1", attempt=attempt, tokens=pack_tokens(tokens), logprobs=logprobs, finish_reason="stop")


def seen(given: list[TokenChunk | AnyTerminal]) -> list[int]:
    return [token for reply in given if isinstance(reply, TokenChunk) for token in unpack_tokens(reply.tokens)]


@st.composite
def journeys(draw: st.DrawFn) -> tuple[list[TokenChunk | Finished], list[int]]:
    """Chunks of two attempts cut anywhere, some lost, some twice, in any order; the terminal last."""
    tokens = draw(st.lists(st.integers(0, 2**32 - 1), max_size=30))
    sent: list[TokenChunk] = []
    for attempt in (1, 2):
        cuts = sorted({0, *draw(st.lists(st.integers(0, len(tokens)), max_size=8)), len(tokens)})
        pieces = [chunk(a, *tokens[a:b], attempt=attempt) for a, b in itertools.pairwise(cuts)]
        sent += [piece for piece in pieces for _ in range(draw(st.integers(0, 2)))]
    on_the_way = draw(st.permutations(sent))
    return [*on_the_way, finished(*tokens, attempt=2), *sent[:2]], tokens


@given(journeys())
def test_any_journey_gives_exactly_the_terminals_tokens(journey: tuple[list[TokenChunk | Finished], list[int]]) -> None:
    sent, tokens = journey
    merge = ReplyMerge()
    given_out = [reply for message in sent for reply in merge.feed(message)]
    assert seen(given_out) == tokens
    assert [reply for reply in given_out if isinstance(reply, Finished)] == [given_out[-1]]
    offset = 0
    for reply in given_out[:-1]:
        assert isinstance(reply, TokenChunk)
        assert reply.offset == offset
        assert [position.token_ids[0] for position in reply.logprobs] == unpack_tokens(reply.tokens)
        offset += len(reply.tokens) // 4


def test_chunks_of_a_lower_attempt_are_dropped() -> None:
    merge = ReplyMerge()
    assert seen(merge.feed(chunk(0, 1, 2, attempt=2))) == [1, 2]
    assert merge.feed(chunk(2, 9, attempt=1)) == []
    assert seen(merge.feed(chunk(2, 3, attempt=2))) == [3]


def test_a_fence_silences_what_came_before_it_and_gives_nothing() -> None:
    merge = ReplyMerge()
    assert seen(merge.feed(chunk(0, 1, 2))) == [1, 2]
    assert merge.feed(chunk(0, attempt=2)) == []
    assert merge.feed(chunk(2, 3)) == []
    assert merge.feed(chunk(0, 1, 2, attempt=2)) == []
    assert seen(merge.feed(chunk(2, 4, attempt=2))) == [4]
    assert seen(merge.feed(finished(1, 2, 4, 5, attempt=2))) == [5]


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 6), st.lists(st.integers(0, 2), max_size=4)), max_size=12), st.data())
def test_whatever_contradicts_what_was_given_ends_as_an_error(pieces: list[tuple[int, int, list[int]]], data: st.DataObject) -> None:
    """Attempts that draw as they like, fences or none: a reader saw the finished answer, or is told of a failure. Who agrees does no harm."""
    merge, given_out = ReplyMerge(), list[TokenChunk | AnyTerminal]()
    for attempt, offset, tokens in pieces:
        given_out += merge.feed(chunk(offset, *tokens, attempt=attempt))
    end = data.draw(st.lists(st.integers(0, 2), max_size=10))
    given_out += merge.feed(finished(*end, attempt=3))
    last = given_out[-1]
    assert not any(isinstance(reply, Finished | Failed) for reply in given_out[:-1])
    assert last.code == "answer_diverged" if isinstance(last, Failed) else seen(given_out) == end
    if all(tokens == end[offset : offset + len(tokens)] for _, offset, tokens in pieces):
        assert isinstance(last, Finished)
    assert merge.feed(finished(*end, attempt=3)) == []


def test_an_early_chunk_that_contradicts_ends_it_while_others_wait() -> None:
    merge = ReplyMerge()
    assert merge.feed(chunk(2, 5)) == merge.feed(chunk(1, 1)) == []
    first, failed = merge.feed(chunk(0, 0, 0))
    assert seen([first]) == [0, 0]
    assert isinstance(failed, Failed)


def test_what_waits_is_bounded() -> None:
    merge = ReplyMerge()
    for offset in range(1, 3 * MAX_WAITING_CHUNKS):
        merge.feed(chunk(offset, offset))
    assert seen(merge.feed(chunk(0, 0))) == list(range(MAX_WAITING_CHUNKS + 1))


def test_a_failure_without_tokens_repeats_nothing() -> None:
    merge = ReplyMerge()
    merge.feed(chunk(0, 1, 2))
    failed = Failed(request_id="r1", attempt=1, code="internal", text="x")
    assert merge.feed(failed) == [failed]


# -- on a real server -------------------------------------------------------------------------------------------------


async def read_all(stream: ReplyStream, timeout_s: float = 30.0) -> list[TokenChunk | AnyTerminal]:
    async with asyncio.timeout(timeout_s):
        return [reply async for reply in stream]


async def opened(bus: Bus, gateway: str, request_id: str = "r1", deadline_ns: int = 0) -> tuple[ReplyStream, InferenceRequest]:
    inbox = ReplyInbox(bus, gateway, WallClock())
    await inbox.start()
    return inbox.open(request_id, "tiny", deadline_ns), request(request_id, gateway)


async def test_live_replies_reach_their_own_waiter(bus: Bus, publisher: Publisher, unique: str) -> None:
    inbox = ReplyInbox(bus, unique, WallClock())
    await inbox.start()
    streams = {request_id: inbox.open(request_id, "tiny") for request_id in ("a", "b", "c")}
    terminals = Terminals(bus, publisher, WallClock())
    order = [(request_id, offset) for request_id in streams for offset in range(5)]
    random.Random(7).shuffle(order)
    for request_id, offset in order:
        piece = TokenChunk(request_id=request_id, attempt=1, offset=offset, tokens=pack_tokens([ord(request_id) + offset]))
        await publisher.send(subjects.reply(unique, request_id), piece)
    for request_id in streams:
        tokens = pack_tokens([ord(request_id) + offset for offset in range(5)])
        end = Finished(request_id=request_id, attempt=1, tokens=tokens, finish_reason="length")
        assert await terminals.end(request(request_id, unique), end)
    for request_id, stream in streams.items():
        assert seen(await read_all(stream)) == [ord(request_id) + offset for offset in range(5)]


async def test_a_lost_terminal_is_looked_up(bus: Bus, publisher: Publisher, unique: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "SILENCE_S", 0.1)
    stream, asked = await opened(bus, unique)
    end = finished(1, 2)
    subject = subjects.result(asked.model, asked.gateway, asked.request_id)
    await publisher.store(subject, end, message_id=f"{unique}:x", first_only=True)  # stored, but its live copy never comes
    *chunks, last = await read_all(stream)
    assert (seen(chunks), last) == ([1, 2], end)


async def test_a_terminal_sent_while_we_were_away_is_found_after_the_reconnect(own_server: NatsServer, unique: str) -> None:
    settings = BrokerSettings(url=own_server.url)
    async with Bus.connect(settings, "reader") as bus, Bus.connect(settings, "writer") as other:
        stream, asked = await opened(bus, unique)
        publisher = Publisher(other)
        subject = subjects.result(asked.model, asked.gateway, asked.request_id)
        await publisher.store(subject, finished(1), message_id=f"{unique}:x", first_only=True)
        reading = asyncio.create_task(read_all(stream))
        await own_server.restart()
        async with asyncio.timeout(replies.SILENCE_S - 1):
            assert seen(await reading) == [1]


async def test_a_reply_that_cannot_be_read_does_not_hang_the_waiter(bus: Bus, publisher: Publisher, unique: str) -> None:
    stream, asked = await opened(bus, unique)
    subject = subjects.result(asked.model, asked.gateway, asked.request_id)
    await publisher.store_bytes(subject, encode(finished(5)), message_id=f"{unique}:x")
    await bus.publish(subjects.reply(unique, "r1"), b"\xc1junk")
    assert seen(await read_all(stream, timeout_s=replies.SILENCE_S - 1)) == [5]


def long_over() -> int:
    """A deadline whose grace is over in a moment."""
    return WallClock().now_ns() - int((replies.DEADLINE_GRACE_S - 0.2) * 1e9)


async def test_what_nobody_holds_any_more_ends_as_expired(bus: Bus, unique: str) -> None:
    stream, _ = await opened(bus, unique, deadline_ns=long_over())
    [last] = await read_all(stream)
    assert isinstance(last, Expired)


async def test_an_end_that_is_stored_counts_whenever_it_is_found(bus: Bus, publisher: Publisher, unique: str) -> None:
    stream, asked = await opened(bus, unique, deadline_ns=long_over())
    subject = subjects.result(asked.model, asked.gateway, asked.request_id)
    await publisher.store(subject, finished(1, 2), message_id=f"{unique}:x", first_only=True)
    assert seen(await read_all(stream)) == [1, 2]


async def test_closing_ends_the_waiting(bus: Bus, unique: str) -> None:
    stream, _ = await opened(bus, unique)
    reading = asyncio.create_task(read_all(stream))
    await asyncio.sleep(0)
    stream.close()
    assert await reading == []


async def test_closing_the_inbox_ends_every_stream(bus: Bus, unique: str) -> None:
    inbox = ReplyInbox(bus, unique, WallClock())
    await inbox.start()
    streams = [inbox.open("r1", "tiny"), inbox.open("r1", "tiny"), inbox.open("r2", "tiny")]
    await inbox.close()
    await inbox.close()
    assert [await read_all(stream) for stream in streams] == [[], [], []]


async def test_lookup_of_a_request_that_is_not_over_says_so(bus: Bus, unique: str) -> None:
    assert await ReplyInbox(bus, unique, WallClock()).lookup("tiny", unique, "nobody") is None
