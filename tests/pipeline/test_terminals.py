"""Exactly one terminal: whoever writes, whoever resends, however large."""

import asyncio

import pytest

from jetwake.deploy.nats_server import NatsServer
from jetwake.pipeline.clock import WallClock
from jetwake.pipeline.connection import Bus
from jetwake.pipeline.jetstream import last_message
from jetwake.pipeline.publish import Publisher
from jetwake.pipeline.replies import ReplyInbox
from jetwake.pipeline.terminals import ReplyTarget, Terminals, shrinking
from jetwake.schemas import subjects
from jetwake.schemas.codec import decode
from jetwake.schemas.errors import RequestSuperseded
from jetwake.schemas.replies import Cancelled, DeadLetter, Failed, Finished, PositionLogprobs
from jetwake.schemas.streams import DEAD
from jetwake.schemas.tokens import pack_tokens

from .harness import request


def finished(tokens: int = 2, positions: int = 0) -> Finished:
    logprobs = [PositionLogprobs(token_ids=[1] * 20, logprobs=[-1.0] * 20, ranks=[1] * 20)] * positions
    return Finished(request_id="r1", attempt=1, tokens=pack_tokens(range(tokens)), logprobs=logprobs, finish_reason="stop")


async def test_one_of_many_writers_wins(bus: Bus, publisher: Publisher, unique: str) -> None:
    writers = [Terminals(bus, publisher, WallClock()) for _ in range(8)]
    ends = [writer.end(request(gateway=unique), finished()) for writer in writers]
    assert sorted(await asyncio.gather(*ends)) == [False] * 7 + [True]


async def test_the_same_writer_cannot_end_a_request_twice(bus: Bus, publisher: Publisher, unique: str) -> None:
    terminals = Terminals(bus, publisher, WallClock())
    assert await terminals.end(request(gateway=unique), finished())
    assert not await terminals.end(request(gateway=unique), Cancelled(request_id="r1", attempt=1))


async def test_only_the_winner_is_heard_live(bus: Bus, publisher: Publisher, unique: str) -> None:
    heard: list[bytes] = []
    await bus.subscribe(subjects.replies_of(unique), lambda message: heard.append(message.data))
    await bus.flush()
    terminals = Terminals(bus, publisher, WallClock())
    for _ in range(3):
        await terminals.end(ReplyTarget("tiny", unique, "r1"), finished())
    await bus.flush()
    assert len(heard) == 1
    assert decode(heard[0], Finished).ended_ns > 0


async def test_an_answer_too_large_loses_its_logprobs_first(bus: Bus, publisher: Publisher, unique: str) -> None:
    await Terminals(bus, publisher, WallClock()).end(request(gateway=unique), finished(tokens=9, positions=40_000))
    end = await ReplyInbox(bus, unique, WallClock()).lookup("tiny", unique, "r1")
    assert isinstance(end, Finished)
    assert (len(end.tokens), end.logprobs) == (36, [])


async def test_an_answer_too_large_for_any_message_becomes_a_failure(bus: Bus, publisher: Publisher, unique: str) -> None:
    await Terminals(bus, publisher, WallClock()).end(request(gateway=unique), finished(tokens=3_000_000))
    end = await ReplyInbox(bus, unique, WallClock()).lookup("tiny", unique, "r1")
    assert isinstance(end, Failed)
    assert end.code == "payload_too_large"


async def test_a_fence_decides_who_may_end_a_request(bus: Bus, publisher: Publisher, unique: str) -> None:
    first, second, third = (request(gateway=unique).model_copy(update={"attempt": attempt}) for attempt in (1, 2, 3))
    terminals = Terminals(bus, publisher, WallClock())
    assert await terminals.fence(second) == 1
    assert not await terminals.end(first, finished())
    assert await terminals.has_ended(first)
    assert not await terminals.has_ended(second)
    with pytest.raises(RequestSuperseded):
        await Terminals(bus, publisher, WallClock()).fence(second)
    assert await terminals.fence(third) == 2
    assert not await terminals.end(second, finished())
    assert await ReplyInbox(bus, unique, WallClock()).lookup("tiny", unique, "r1") is None
    assert await terminals.end(third, finished())
    with pytest.raises(RequestSuperseded):
        await terminals.fence(third.model_copy(update={"attempt": 4}))
    assert await ReplyInbox(bus, unique, WallClock()).lookup("tiny", unique, "r1") is not None


async def test_a_fence_and_an_end_at_the_same_time(bus: Bus, publisher: Publisher, unique: str) -> None:
    """Either the earlier attempt ended the request, or the later one may: never both, never neither."""
    for number in range(50):
        first = request(f"r{number}", unique)
        second = first.model_copy(update={"attempt": 2})
        writers = [Terminals(bus, publisher, WallClock()) for _ in range(2)]
        ended, fenced = await asyncio.gather(writers[0].end(first, finished()), writers[1].fence(second), return_exceptions=True)
        assert (ended is True) == isinstance(fenced, RequestSuperseded)
        assert await writers[1].end(second, finished()) == (ended is False)


async def test_whoever_cannot_read_a_request_may_end_it_whatever_its_attempt(bus: Bus, publisher: Publisher, unique: str) -> None:
    terminals = Terminals(bus, publisher, WallClock())
    await terminals.fence(request(gateway=unique).model_copy(update={"attempt": 2}))
    assert await terminals.end(ReplyTarget("tiny", unique, "r1"), finished())


def test_shrinking_keeps_who_it_was() -> None:
    whole, bare, failed = shrinking(finished(positions=2))
    assert (whole.request_id, bare.logprobs, failed.request_id, failed.attempt) == ("r1", [], "r1", 1)


async def test_a_dead_letter_too_large_for_its_envelope_keeps_its_facts(bus: Bus, publisher: Publisher) -> None:
    letter = DeadLetter(stage="huge", subject="jw.x", code="undecodable", text="bad", payload=bytes(bus.max_payload_bytes))
    await Terminals(bus, publisher, WallClock()).dead_letter(letter)
    kept = await last_message(bus, DEAD.name, subjects.dead("huge"))
    assert kept is not None
    assert "left out" in decode(kept.data, DeadLetter).text


async def test_the_end_is_stored_over_a_broker_restart(own_server: NatsServer, unique: str) -> None:
    from jetwake.pipeline.settings import BrokerSettings

    async with Bus.connect(BrokerSettings(url=own_server.url), "test") as bus:
        terminals = Terminals(bus, Publisher(bus), WallClock())
        ids = [f"r{n}" for n in range(200)]
        ends = asyncio.gather(*(terminals.end(request(each, unique), finished()) for each in ids))
        await own_server.kill()
        await own_server.start()
        assert all(await ends)
        assert not any(await asyncio.gather(*(terminals.end(request(each, unique), finished()) for each in ids)))
