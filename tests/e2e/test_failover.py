"""Workers that die in mid-answer: the answer goes on after the tokens that were given, and whatever a reader saw is part of its end.

Nothing is seeded: two legs never draw the same, so a token of the wrong leg shows.
"""

import asyncio
import itertools
import random
import secrets
from typing import Any

import pytest
from fleet import Fleet, fleet_of
from operations import until

from jetwake.consumers.timing import PolynomialTiming
from jetwake.deploy.nats_server import NatsServer
from jetwake.pipeline.checkpoints import checkpoint
from jetwake.pipeline.clock import WallClock
from jetwake.pipeline.connection import Bus
from jetwake.pipeline.jetstream import api
from jetwake.pipeline.publish import Publisher
from jetwake.pipeline.terminals import Terminals
from jetwake.producers.client import Client, Submitted
from jetwake.producers.reading import Answer, Piece
from jetwake.schemas import subjects
from jetwake.schemas.errors import AnswerDiverged, EngineDead, RequestFailed, UnknownRequest
from jetwake.schemas.replies import Finished, TokenChunk
from jetwake.schemas.tokens import pack_tokens

pytestmark = pytest.mark.timeout(90)

STEPS = PolynomialTiming((0.0, 0.0, 0.0), (0.0, 0.0, 1.0))
"""A millisecond for each token."""
LENGTH = 150
STOP = "77><1"
"""Straddles tokens; at random, one answer in four is over before it comes."""
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "logprobs": {"logprobs": 2},
    "stop": {"stop": [STOP], "max_tokens": 400},
    "greedy": {"temperature": 0.0},
}

LONG: dict[str, Any] = {"max_tokens": 600}


class Reader:
    """Reads one answer to its end, and can wait for a number of tokens."""

    def __init__(self, submitted: Submitted) -> None:
        self.submitted = submitted
        self.pieces: list[Piece] = []
        self._more = asyncio.Event()
        self.reading = asyncio.create_task(self._read())

    @property
    def tokens(self) -> list[int]:
        return [token for piece in self.pieces for token in piece.token_ids]

    async def _read(self) -> None:
        async for piece in self.submitted:
            self.pieces.append(piece)
            self._more.set()

    async def has(self, tokens: int) -> None:
        """Returns when so many are there, or the answer ended."""
        while len(self.tokens) < tokens and not self.reading.done():
            self._more.clear()
            more = asyncio.ensure_future(self._more.wait())
            await asyncio.wait([more, self.reading], return_when=asyncio.FIRST_COMPLETED)
            more.cancel()

    async def end(self) -> Answer:
        async with asyncio.timeout(60):
            await self.reading
        return await self.submitted.answer()


def check(reader: Reader, answer: Answer, options: dict[str, Any]) -> None:
    assert reader.tokens == answer.token_ids
    whole = "".join(f"<{token}>" for token in answer.token_ids)
    if answer.finish_reason == "stop":
        assert whole.count(STOP) == 1
        assert whole.index(STOP) > len(whole) - len(STOP) - len(f"<{answer.token_ids[-1]}>")
        whole = whole[: whole.index(STOP)]
    else:
        assert len(answer.token_ids) == options.get("max_tokens", LENGTH)
    assert "".join(piece.text for piece in reader.pieces) == answer.text == whole
    if "logprobs" in options:
        assert [entry for piece in reader.pieces for entry in piece.logprobs] == answer.logprobs
        assert [entry.token_ids[0] for entry in answer.logprobs] == answer.token_ids


async def submit(client: Client, options: dict[str, Any]) -> Reader:
    prompt = [random.randrange(250) for _ in range(40)]
    return Reader(await client.submit(prompt, **{"max_tokens": LENGTH, "temperature": 1.0, **options}))


def busy(fleet: Fleet, role: str) -> list[str]:
    return [
        name for name, engine in fleet.engines.items() if name.startswith(role) and name in fleet.names and engine.stats().running_requests
    ]


async def engine_dies(fleet: Fleet, name: str) -> None:
    await fleet.engines[name].stop()
    with pytest.raises(EngineDead):
        await fleet.ended(name)


@pytest.mark.parametrize("name", OPTIONS)
async def test_an_answer_goes_on_where_its_decode_worker_died(own_server: NatsServer, name: str) -> None:
    """At any point of the answer, in turn by a crash that hands nothing on and one that does, until five answers had to move."""
    options, moved = OPTIONS[name], 0
    async with fleet_of(own_server.url, prefill=2, decode=2, timing=STEPS) as (fleet, client):
        for number in itertools.count():
            reader = await submit(client, options)
            await reader.has(random.randrange(1, LENGTH))
            for doomed in busy(fleet, "decode"):
                if number % 2:
                    await engine_dies(fleet, doomed)
                else:
                    await fleet.kill(doomed)
                fleet.start_worker("decode", f"decode-{secrets.token_hex(3)}", timing=STEPS)
            answer = await reader.end()
            check(reader, answer, options)
            moved += answer.attempts > 1
            if moved == 5:
                break


async def test_an_answer_survives_several_deaths(own_server: NatsServer) -> None:
    """Two in one answer: what the second continues was partly forced itself."""
    async with fleet_of(own_server.url, prefill=2, decode=3, timing=STEPS) as (fleet, client):
        for _ in range(3):
            reader = await submit(client, LONG)
            for at in (random.randrange(1, 60), random.randrange(60, 120)):
                await reader.has(at)
                for doomed in busy(fleet, "decode"):
                    await fleet.kill(doomed)
                    fleet.start_worker("decode", f"decode-{secrets.token_hex(3)}", timing=STEPS)
            answer = await reader.end()
            check(reader, answer, LONG)
            assert answer.attempts > 1


async def test_many_answers_at_once_go_on_elsewhere(own_server: NatsServer) -> None:
    async with fleet_of(own_server.url, prefill=2, decode=2, timing=STEPS) as (fleet, client):
        readers = await asyncio.gather(*(submit(client, LONG) for _ in range(40)))
        await until(lambda: fleet.engines["decode-1"].stats().running_requests > 8)
        await fleet.kill("decode-1")
        answers = [await reader.end() for reader in readers]
        for reader, answer in zip(readers, answers, strict=True):
            check(reader, answer, LONG)
        assert sum(answer.attempts > 1 for answer in answers) > 5


@pytest.mark.parametrize("name", OPTIONS)
async def test_an_aggregated_worker_that_dies(own_server: NatsServer, name: str) -> None:
    options, moved = OPTIONS[name], 0
    async with fleet_of(own_server.url, aggregated=2, timing=STEPS) as (fleet, client):
        while not moved:
            readers = await asyncio.gather(*(submit(client, options) for _ in range(8)))
            await readers[-1].has(random.randrange(1, LENGTH // 2))  # one is in the middle, whatever the machine's pace
            for doomed in busy(fleet, "aggregated")[:1]:
                await fleet.kill(doomed)
                fleet.start_worker("aggregated", f"aggregated-{secrets.token_hex(3)}", timing=STEPS)
            for reader in readers:
                answer = await reader.end()
                check(reader, answer, options)
                moved += answer.attempts > 1


async def test_what_a_late_riser_says_is_not_heard(own_server: NatsServer) -> None:
    """A worker that slept through its own replacement wakes up: chunks, a checkpoint and a terminal of its attempt come too late."""
    async with (
        fleet_of(own_server.url, prefill=1, decode=2, timing=STEPS) as (fleet, client),
        Bus.connect(fleet.broker, "late") as bus,
    ):
        publisher, terminals = Publisher(bus), Terminals(bus, Publisher(bus), WallClock())
        for _ in range(3):
            fenced = asyncio.Event()
            reader = await submit(client, LONG)
            request = reader.submitted.request
            await bus.subscribe(subjects.cancel(request.request_id), lambda _, fenced=fenced: fenced.set())
            await reader.has(30)
            [doomed] = busy(fleet, "decode")
            await fleet.kill(doomed)
            fleet.start_worker("decode", f"decode-{secrets.token_hex(3)}", timing=STEPS)
            async with asyncio.timeout(10):
                await fenced.wait()
            await reader.has(len(reader.tokens) + 1)  # the next attempt goes on
            offset = len(reader.tokens)
            late = pack_tokens(range(1, 9))
            chunk = TokenChunk(request_id=request.request_id, attempt=1, offset=offset, tokens=late)
            for shift in range(8):
                await publisher.send(subjects.reply(client.name, request.request_id), chunk.model_copy(update={"offset": offset + shift}))
            await checkpoint(publisher, request, pack_tokens(range(500)))
            end = Finished(request_id=request.request_id, attempt=1, tokens=late, finish_reason="length")
            assert not await terminals.end(request, end)
            second = await client.resume(request.request_id)
            seen = [token async for piece in second for token in piece.token_ids]
            answer = await reader.end()
            check(reader, answer, LONG)
            assert seen == answer.token_ids
            assert answer.attempts == 2


@pytest.mark.parametrize("name", ["plain", "greedy"])
async def test_what_was_given_is_forgotten_by_the_broker(own_server: NatsServer, name: str) -> None:
    """Only readers know then what they saw. What repeats itself goes on for them; what does not is an error, told as such."""
    options, failed = LONG | OPTIONS[name], 0
    async with (
        fleet_of(own_server.url, prefill=1, decode=2, timing=STEPS) as (fleet, client),
        Bus.connect(fleet.broker, "forgetful") as bus,
    ):
        for _ in range(4):
            reader = await submit(client, options)
            await reader.has(random.randrange(10, 100))
            [doomed] = busy(fleet, "decode")
            killing = asyncio.create_task(fleet.kill(doomed))
            for stream in ("JW_REPLIES", "JW_ANSWERS"):
                await api(bus, f"STREAM.PURGE.{stream}")
            await killing
            fleet.start_worker("decode", f"decode-{secrets.token_hex(3)}", timing=STEPS)
            [ending] = await asyncio.gather(reader.end(), return_exceptions=True)
            if isinstance(ending, Answer):
                check(reader, ending, options)
            else:
                assert isinstance(ending, RequestFailed), ending
                assert ending.reply_code == AnswerDiverged.code
                failed += 1
                async with asyncio.timeout(20):
                    while busy(fleet, "decode"):  # nobody reads it any more
                        await asyncio.sleep(0.01)
    assert failed > 0 if name == "plain" else failed == 0


# -- readers that come later ------------------------------------------------------------------------------------------------


async def test_any_offset_on_any_client_while_it_runs_and_after(own_server: NatsServer) -> None:
    async with fleet_of(own_server.url, prefill=1, decode=1, timing=STEPS) as (fleet, client), Client.connect(fleet.broker) as other:
        first = await submit(client, {"stop": ["no such text"], "logprobs": 1})
        request_id = first.submitted.request_id

        async def resumed(offset: int, reader: Client) -> None:
            pieces = [piece async for piece in await reader.resume(request_id, offset)]
            answer = await first.end()
            assert [token for piece in pieces for token in piece.token_ids] == answer.token_ids[offset:]
            assert "".join(piece.text for piece in pieces) == "".join(f"<{token}>" for token in answer.token_ids[offset:])
            assert [entry for piece in pieces for entry in piece.logprobs] == answer.logprobs[offset:]

        early = [asyncio.create_task(resumed(offset, other)) for offset in range(0, LENGTH + 3, 7)]
        await first.has(LENGTH // 2)
        running = [asyncio.create_task(resumed(offset, reader)) for offset in range(0, LENGTH + 3, 5) for reader in (client, other)]
        await asyncio.gather(*early, *running)
        for offset in range(LENGTH + 2):
            await resumed(offset, other)
        third = await other.resume(request_id, 3)
        assert (await third.answer()).token_ids == (await first.end()).token_ids


async def test_a_stream_by_id(own_server: NatsServer) -> None:
    """Leaving it leaves the request alone; what is not known is said to be unknown."""
    async with fleet_of(own_server.url, prefill=1, decode=1, timing=STEPS) as (fleet, client), Client.connect(fleet.broker) as other:
        reader = await submit(client, {})
        again = other.stream(reader.submitted.request_id, after=0)
        await anext(again)
        await again.aclose()
        answer = await reader.end()
        assert [token async for piece in other.stream(answer.request_id, after=100) for token in piece.token_ids] == answer.token_ids[100:]
        with pytest.raises(UnknownRequest, match="nobody-asked-this"):
            await other.resume("nobody-asked-this")


async def test_a_waiting_request_can_be_attached_to(own_server: NatsServer) -> None:
    """It is found before any worker has begun it, and read while it moves from one worker to another."""
    async with fleet_of(own_server.url, prefill=1, decode=1, timing=STEPS) as (fleet, client), Client.connect(fleet.broker) as other:
        await fleet.stop("prefill-1")
        first = await submit(client, LONG)
        second = Reader(await other.resume(first.submitted.request_id))  # type: ignore[arg-type]
        fleet.start_worker("prefill", "prefill-2", timing=STEPS)
        await second.has(40)
        await fleet.kill("decode-1")
        fleet.start_worker("decode", "decode-2", timing=STEPS)
        answer = await first.end()
        assert (await second.end()).token_ids == second.tokens == answer.token_ids
        assert answer.attempts > 1
