"""One request's whole way, many times over: real broker, real NIXL, simulated engines whose every pulled block is verified."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fleet import Fleet, fleet_of
from operations import cards_live_long

from jetwake.consumers.timing import DYNAMO_DEFAULT as SLOW
from jetwake.deploy.chaos.freezing import freeze, thaw
from jetwake.deploy.nats_server import NatsServer
from jetwake.pipeline.connection import Bus, RawMessage
from jetwake.pipeline.jetstream import stored_messages
from jetwake.pipeline.publish import Publisher
from jetwake.pipeline.settings import BrokerSettings
from jetwake.pipeline.topology import consumer_counts, queue_progress, stream_counts
from jetwake.producers.client import Answer, Client
from jetwake.schemas import subjects
from jetwake.schemas.codec import decode, encode
from jetwake.schemas.errors import (
    BrokerUnavailable,
    DeadlineExceeded,
    InvalidRequest,
    PayloadTooLarge,
    PromptTooLong,
    RequestCancelled,
    RequestFailed,
    UnknownModel,
)
from jetwake.schemas.replies import AnyTerminal, DeadLetter, Failed, Reply
from jetwake.schemas.requests import InferenceRequest, Sampling
from jetwake.schemas.streams import HANDOFF, PREFILL, REQUESTS, RESULTS
from jetwake.schemas.tokens import pack_tokens

Pair = tuple[Fleet, Client]


@pytest.fixture
async def pair(nats_server: NatsServer, unique: str) -> AsyncIterator[Pair]:
    async with fleet_of(nats_server.url, prefill=1, decode=1, model=unique) as pair:
        yield pair


def prompt_of(number: int, length: int = 40) -> list[int]:
    return [number % 250, number // 250 % 250, *(i % 250 for i in range(length - 2))]


async def idle(fleet: Fleet) -> None:
    """Every block is free again on every engine, by each engine's own word."""
    async with asyncio.timeout(10):
        for engine in fleet.engines.values():
            await engine.drain()
    for name, engine in fleet.engines.items():
        assert engine.stats().used_blocks == 0, name
        assert not await engine.held(), name


async def test_an_answer_goes_through_two_workers_and_moves_bytes(pair: Pair) -> None:
    fleet, client = pair
    answer = await client.generate(prompt_of(1), max_tokens=5, temperature=0.0)
    assert len(answer.token_ids) == 5
    assert answer.finish_reason == "length"
    assert (answer.prefill_worker, answer.decode_worker) == ("prefill-1", "decode-1")
    assert answer.kv_bytes > 0
    assert answer.attempts == 1
    await idle(fleet)


async def test_the_pieces_are_the_answer(pair: Pair) -> None:
    _, client = pair
    submitted = await client.submit(prompt_of(2), max_tokens=40, temperature=0.0, logprobs=2)
    pieces = [piece async for piece in submitted]
    answer = await submitted.answer()
    assert [token for piece in pieces for token in piece.token_ids] == answer.token_ids
    assert "".join(piece.text for piece in pieces) == answer.text
    assert [entry for piece in pieces for entry in piece.logprobs] == answer.logprobs
    assert len(answer.logprobs) == 40


@pytest.mark.parametrize("options", [{"max_tokens": 1}, {"max_tokens": 30, "temperature": 1.0, "seed": 7}, {"max_tokens": 50}])
async def test_disaggregated_equals_aggregated(pair: Pair, own_server: NatsServer, unique: str, options: dict[str, Any]) -> None:
    _, client = pair
    async with fleet_of(own_server.url, aggregated=1, model=unique) as (_, alone):
        for length in (3, 16, 17, 1000):
            request = {"temperature": 0.0, **options}
            split = await client.generate(prompt_of(3, length), **{"model": unique, **request})
            whole = await alone.generate(prompt_of(3, length), **request)
            assert whole.kv_bytes == 0
            assert (split.token_ids, split.finish_reason) == (whole.token_ids, whole.finish_reason)


async def test_two_thousand_requests_over_six_workers_finish_once_each(own_server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    cards_live_long(monkeypatch)  # or some would move
    async with fleet_of(own_server.url, prefill=3, decode=3, slots=64) as (fleet, client):
        terminals: list[str] = []
        verified_before = total(fleet, "blocks_verified")

        def count(message: RawMessage) -> None:
            reply = decode(message.data, Reply)  # type: ignore[arg-type]
            if reply.type != "chunk":
                terminals.append(reply.request_id)

        async with Bus.connect(fleet.broker, "counter") as bus:
            await bus.subscribe(subjects.replies_of(client.name), count)
            await bus.flush()
            answers = await asyncio.gather(*(limited(client, number) for number in range(2000)))
            await bus.flush()
            await idle(fleet)
            counts, streams = await consumer_counts(bus), await stream_counts(bus)
        assert [streams[spec.name].size_bytes for spec in (REQUESTS, PREFILL, HANDOFF)] == [0, 0, 0]
        assert len({answer.request_id for answer in answers}) == 2000
        assert sorted(terminals) == sorted(answer.request_id for answer in answers)
        assert {answer.attempts for answer in answers} == {1}
        assert {answer.prefill_worker for answer in answers} == {"prefill-1", "prefill-2", "prefill-3"}
        assert {answer.decode_worker for answer in answers} == {"decode-1", "decode-2", "decode-3"}
        verified = total(fleet, "blocks_verified") - verified_before
        assert verified * BLOCK_BYTES == sum(answer.kv_bytes for answer in answers) > 0
        assert total(fleet, "blocks_wrong") == 0
        assert all((count.pending, count.in_progress) == (0, 0) for count in counts.values()), counts


LIMIT = asyncio.Semaphore(400)
BLOCK_BYTES = 512


def total(fleet: Fleet, counter: str) -> int:
    return sum(engine.stats().counters.get(counter, 0) for engine in fleet.engines.values())


async def limited(client: Client, number: int) -> Answer:
    async with LIMIT:
        return await client.generate(prompt_of(number, 20 + number % 300), max_tokens=2 + number % 12, temperature=0.0)


# -- what is wrong is told at once, by the first who can know ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "options", "error", "words"),
    [
        ([], {}, InvalidRequest, "empty"),
        ([1] * 40_000, {}, PromptTooLong, "32768"),
        ([1], {"max_tokens": 40_000}, PromptTooLong, "32767"),
        ([1], {"model": "nobody-has-it"}, UnknownModel, "nobody-has-it"),
        ([1], {"temperature": -1.0}, InvalidRequest, "temperature"),
        ([1], {"temprature": 1.0}, InvalidRequest, "temprature"),
        ([-1], {}, InvalidRequest, "negative"),
        ([10**6], {}, InvalidRequest, "vocabulary"),
        ([1], {"request_id": "a.b"}, InvalidRequest, "request_id"),
    ],
)
async def test_the_client_refuses_before_sending(
    pair: Pair, unique: str, prompt: list[int], options: dict[str, Any], error: type[Exception], words: str
) -> None:
    _, client = pair
    with pytest.raises(error, match=words):
        await client.submit(prompt, **{"model": unique, **options})


class Caller:
    """Somebody who publishes by hand and listens for what comes back."""

    def __init__(self, bus: Bus, model: str) -> None:
        self.bus, self.model, self.publisher = bus, model, Publisher(bus)
        self.replies: asyncio.Queue[Failed] = asyncio.Queue()
        self.letters: asyncio.Queue[DeadLetter] = asyncio.Queue()

    async def start(self) -> None:
        await self.bus.subscribe(subjects.replies_of("caller"), lambda raw: self.replies.put_nowait(decode(raw.data, Failed)))
        await self.bus.subscribe("jw.dead.>", lambda raw: self.letters.put_nowait(decode(raw.data, DeadLetter)))

    def request(self, request_id: str, prompt: list[int], **changes: Any) -> InferenceRequest:
        fields = {"request_id": request_id, "gateway": "caller", "model": self.model, "sampling": Sampling(max_tokens=4), **changes}
        return InferenceRequest(prompt_tokens=pack_tokens(prompt), **fields)

    async def publish(self, payload: bytes, request_id: str, model: str | None = None) -> None:
        model = model or self.model
        headers = {subjects.REQUEST_ID_HEADER: subjects.reply_target(model, "caller", request_id)}
        subject = subjects.requests(model, "interactive")
        await self.publisher.store_bytes(subject, payload, message_id=f"{request_id}:by-hand", headers=headers)


@pytest.fixture
async def caller(pair: Pair, bus: Bus, unique: str) -> Caller:
    caller = Caller(bus, unique)
    await caller.start()
    return caller


@pytest.mark.parametrize(
    ("prompt", "changes", "code", "words"),
    [
        ([], {}, "invalid_request", "empty"),
        ([1] * 40_000, {}, "prompt_too_long", "32768"),
        ([1], {"model": "nobody"}, "unknown_model", "nobody"),
        ([999_999], {}, "invalid_request", "vocabulary"),
        ([1, 2], {"sampling": Sampling(max_tokens=4, bad_words=["x"])}, "engine_refused", "bad_words"),
    ],
)
async def test_a_request_by_hand_that_is_wrong_gets_a_failed_reply(
    caller: Caller, unique: str, prompt: list[int], changes: dict[str, Any], code: str, words: str
) -> None:
    request = caller.request(unique, prompt, **changes)
    await caller.publish(encode(request), unique, model=changes.get("model"))
    async with asyncio.timeout(5):
        reply = await caller.replies.get()
    assert (reply.request_id, reply.code) == (unique, code)
    assert words in reply.text


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1nonsense", b"\x81\xa4type\xa7unknown", encode(Failed(request_id="x", attempt=1, code="c", text="t"))]
)
async def test_bytes_that_are_no_request_become_a_dead_letter_and_a_failed_reply(
    caller: Caller, pair: Pair, unique: str, payload: bytes
) -> None:
    await caller.publish(payload, unique)
    async with asyncio.timeout(5):
        reply, letter = await caller.replies.get(), await caller.letters.get()
    assert (reply.request_id, reply.code) == (unique, "undecodable")
    assert (letter.payload, letter.request_id) == (payload, unique)
    _, client = pair
    assert (await client.generate([1, 2, 3], model=unique, max_tokens=2)).finish_reason == "length"


async def test_a_message_over_the_brokers_limit_is_refused_with_both_sizes_and_the_connection_lives(caller: Caller, unique: str) -> None:
    request = caller.request(unique, [1] * 3_000_000)
    with pytest.raises(PayloadTooLarge, match=str(caller.bus.max_payload_bytes)):
        await caller.publish(encode(request), unique)
    await caller.publish(encode(caller.request(unique, [])), unique)
    async with asyncio.timeout(5):
        assert (await caller.replies.get()).code == "invalid_request"


# -- cancelled, expired ---------------------------------------------------------------------------------------------------


async def test_a_cancelled_answer_ends_as_cancelled_and_frees_its_blocks(nats_server: NatsServer, unique: str) -> None:
    async with fleet_of(nats_server.url, prefill=1, decode=1, model=unique, timing=SLOW) as (fleet, client):
        submitted = await client.submit(prompt_of(9, 100), max_tokens=10_000)
        pieces = aiter(submitted)
        await anext(pieces)
        await submitted.cancel()
        with pytest.raises(RequestCancelled):
            await submitted.answer()
        await idle(fleet)


async def test_leaving_a_stream_early_cancels_it(nats_server: NatsServer, unique: str) -> None:
    async with fleet_of(nats_server.url, prefill=1, decode=1, model=unique, timing=SLOW) as (fleet, client):
        stream = client.stream(prompt_of(9, 100), max_tokens=10_000)
        await anext(stream)
        await stream.aclose()
        await idle(fleet)


async def test_whoever_is_cancelled_while_sending_leaves_no_request_behind(own_server: NatsServer) -> None:
    """Cancelled after ever more turns of the loop, some twice: before the request is sent, while it is stored, and after."""
    async with fleet_of(own_server.url, prefill=1, decode=1, timing=SLOW) as (fleet, client), Bus.connect(fleet.broker, "test") as bus:

        async def ask(number: int) -> None:
            if number % 4 < 2:
                await client.generate(prompt_of(number), max_tokens=30_000)
            else:
                async for _ in client.stream(prompt_of(number), max_tokens=30_000):
                    pass

        await client.generate(prompt_of(999), max_tokens=1)
        before = sum(await queue_progress(bus, REQUESTS.name))
        for number in range(100):
            asking = asyncio.create_task(ask(number))
            for _ in range(number * number // 10):
                await asyncio.sleep(0)
            asking.cancel()
            if number % 2:
                await asyncio.sleep(0)
                asking.cancel()
            await asyncio.wait([asking])
            assert asking.cancelled()
        stored = sum(await queue_progress(bus, REQUESTS.name)) - before
        assert 10 < stored < 100
        assert await ends_of(bus, client, 1 + stored) == ["finished"] + ["cancelled"] * stored
        await idle(fleet)


async def test_a_request_of_which_it_is_not_known_whether_it_was_stored(own_server: NatsServer) -> None:
    """The broker stands still as it is sent. Where nobody knows its id it is cancelled; else it can be found, and ends."""
    async with fleet_of(own_server.url, prefill=1, decode=1) as (fleet, _), Bus.connect(fleet.broker, "test") as bus:
        hasty = BrokerSettings(url=own_server.url, request_timeout_s=0.5, publish_deadline_s=0.5)
        async with Client.connect(hasty) as client:
            client.default_model = "sim"
            await client.generate(prompt_of(1), max_tokens=1)
            for options in ({"max_tokens": 30_000}, {"max_tokens": 20, "request_id": "mine"}):
                await freeze(own_server.pid)
                with pytest.raises(BrokerUnavailable):
                    await client.submit(prompt_of(2), **options)
                thaw(own_server.pid)
            assert await ends_of(bus, client, 3) == ["finished", "cancelled", "finished"]
            assert len((await (await client.resume("mine")).answer()).token_ids) == 20
        await idle(fleet)


async def ends_of(bus: Bus, client: Client, count: int) -> list[str]:
    """How its requests ended, in the order of their ends, as soon as there are so many."""
    async with asyncio.timeout(30):
        while len(ends := await stored_messages(bus, RESULTS.name, subjects.results_of("*", client.name))) < count:
            await asyncio.sleep(0.05)
    return [decode(end.data, AnyTerminal).type for end in ends]


async def test_a_request_whose_deadline_passes_while_it_generates_expires(nats_server: NatsServer, unique: str) -> None:
    async with fleet_of(nats_server.url, prefill=1, decode=1, model=unique, timing=SLOW) as (fleet, client):
        with pytest.raises(DeadlineExceeded, match="during decode"):
            await client.generate(prompt_of(9, 100), max_tokens=10_000, timeout_s=1.0)
        await idle(fleet)


async def test_a_cancelled_handoff_that_nobody_claims_frees_its_blocks_and_ends(nats_server: NatsServer, unique: str) -> None:
    async with fleet_of(nats_server.url, prefill=1, decode=1, model=unique, slots=2, timing=SLOW) as (fleet, client):
        busy = [await client.submit(prompt_of(n, 50), max_tokens=10_000) for n in range(2)]
        for each in busy:
            await anext(aiter(each))
        waiting = await client.submit(prompt_of(7, 50), max_tokens=10)
        pieces = aiter(waiting)
        await anext(pieces)  # its first token comes from the prefill worker; no decode slot is free
        await waiting.cancel()
        with pytest.raises(RequestCancelled):
            await anext(pieces)
        for each in busy:
            await each.cancel()
        await idle(fleet)


@pytest.mark.parametrize("workers", [{"aggregated": 2}, {"prefill": 1, "decode": 2}])
async def test_what_fits_no_worker_fails_at_once_with_both_numbers(nats_server: NatsServer, unique: str, workers: dict[str, int]) -> None:
    """It is not moved from worker to worker: none of them has the room."""
    async with fleet_of(nats_server.url, model=unique, num_blocks=100, **workers) as (_, client):
        with pytest.raises(RequestFailed, match=r"132.*100") as failure:
            await client.generate(prompt_of(9, 95 * 16), max_tokens=37 * 16)
        assert failure.value.reply_code == "engine_refused"
