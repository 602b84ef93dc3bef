"""KV-aware routing on the real bus: what routers predict is what engines find, whatever happens to workers, routers and events."""

import asyncio
import random

import pytest
from fleet import fleet_of
from operations import until

from jetwake.consumers.timing import DYNAMO_DEFAULT, PolynomialTiming
from jetwake.deploy.nats_server import NatsServer
from jetwake.pipeline.connection import Bus, RawMessage
from jetwake.producers.client import Answer, Client
from jetwake.schemas import subjects
from jetwake.schemas.codec import decode, encode
from jetwake.schemas.errors import NoWorker, RequestCancelled
from jetwake.schemas.kv_events import KvEvents

BLOCK = 16


def prefix_of(number: int, length: int = 20 * BLOCK) -> list[int]:
    return [number % 250 + 1, *(i % 250 for i in range(length - 1))]


async def ask(client: Client, prompt: list[int]) -> Answer:
    return await client.generate(prompt, max_tokens=2, temperature=0.0)


async def test_requests_that_share_a_prefix_go_where_it_is_cached(nats_server: NatsServer, unique: str) -> None:
    length = 250 * BLOCK
    async with fleet_of(nats_server.url, prefill=3, decode=1, model=unique, policy="kv_aware", timing=DYNAMO_DEFAULT) as (_, client):
        first = {number: await ask(client, prefix_of(number, length)) for number in range(6)}
        for turn in range(1, 4):
            for number, answer in first.items():
                again = await ask(client, [*prefix_of(number, length), 240 + turn, *[turn] * 20])
                assert again.prefill_worker == answer.prefill_worker
                assert again.cached_tokens == again.predicted_cached_tokens == length
        assert len({answer.prefill_worker for answer in first.values()}) == 3


@pytest.mark.parametrize("other", [{"lora": "a"}, {"cache_salt": "tenant"}])
async def test_nothing_matches_across_adapters_and_salts(nats_server: NatsServer, unique: str, other: dict[str, str]) -> None:
    async with fleet_of(nats_server.url, prefill=2, decode=1, model=unique, policy="kv_aware") as (_, client):
        await ask(client, prefix_of(1))
        submitted = await client.submit(prefix_of(1), max_tokens=2, **other)
        answer = await submitted.answer()
        assert (answer.cached_tokens, answer.predicted_cached_tokens) == (0, 0)


async def test_a_hot_prefix_does_not_pile_up_on_one_worker(nats_server: NatsServer, unique: str) -> None:
    async with fleet_of(nats_server.url, prefill=3, decode=1, model=unique, policy="kv_aware", timing=DYNAMO_DEFAULT) as (_, client):
        await ask(client, prefix_of(1))
        burst = await asyncio.gather(*(ask(client, [*prefix_of(1), *[number] * 600]) for number in range(24)))
        assert len({answer.prefill_worker for answer in burst}) == 3


class Noise:
    """Doubles every event, sends old ones again late, and now and then one from the future, which reads as a gap."""

    def __init__(self, bus: Bus, seed: int) -> None:
        self._bus = bus
        self._random = random.Random(seed)
        self._old: list[tuple[str, bytes]] = []
        self._mine: set[bytes] = set()
        self._out: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()

    def hear(self, message: RawMessage) -> None:
        if message.data in self._mine:
            return
        self._mine.add(message.data)
        self._out.put_nowait((message.subject, message.data))
        self._old.append((message.subject, message.data))
        dice = self._random.random()
        if dice < 0.1:
            self._out.put_nowait(self._random.choice(self._old))
        elif dice < 0.2:
            events = decode(message.data, KvEvents)
            future = encode(events.model_copy(update={"number": events.number + 1000}))
            self._mine.add(future)
            self._out.put_nowait((message.subject, future))

    async def run(self) -> None:
        while True:
            await self._bus.publish(*await self._out.get())


async def test_predictions_are_true_through_evictions_restarts_and_noise(own_server: NatsServer) -> None:
    """Each worker holds about four of the ten prefixes. A worker and the router are replaced on the way."""
    options = {"num_blocks": 100, "slots": 8}
    async with (
        fleet_of(own_server.url, prefill=3, decode=1, policy="kv_aware", **options) as (fleet, client),
        Bus.connect(fleet.broker, "noise") as bus,
    ):
        noise = Noise(bus, seed=3)
        await bus.subscribe(subjects.KV_EVENTS, noise.hear)
        running = asyncio.create_task(noise.run())
        dice, answers = random.Random(1), list[Answer]()
        for step in range(240):
            answers.append(await ask(client, [*prefix_of(dice.randrange(10)), *[dice.randrange(200) for _ in range(30)]]))
            if step == 80:
                await fleet.stop("prefill-2")
                fleet.start_worker("prefill", "prefill-2", **options)
            if step == 160:
                await fleet.stop("router-1")
                fleet.start_router("router-2", policy="kv_aware")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    right = sum(abs(answer.predicted_cached_tokens - answer.cached_tokens) <= BLOCK for answer in answers)
    assert sum(answer.cached_tokens > 0 for answer in answers) > 60
    assert right >= 0.95 * len(answers), f"{right} of {len(answers)}"


async def test_a_new_router_knows_the_caches_without_traffic(own_server: NatsServer) -> None:
    length = 250 * BLOCK
    async with fleet_of(own_server.url, prefill=3, decode=1, policy="kv_aware", timing=DYNAMO_DEFAULT) as (fleet, client):
        warm = {number: (await ask(client, prefix_of(number, length))).prefill_worker for number in range(6)}
        await fleet.stop("router-1")
        fleet.start_router("router-2", policy="kv_aware")
        for number, worker in warm.items():
            answer = await ask(client, prefix_of(number, length))
            assert (answer.prefill_worker, answer.predicted_cached_tokens) == (worker, length - BLOCK)


async def test_two_routers_share_the_work_and_know_of_each_others_decisions(own_server: NatsServer) -> None:
    async with fleet_of(own_server.url, prefill=3, decode=1, policy="kv_aware") as (fleet, client):
        fleet.start_router("router-2", policy="kv_aware")
        answers = await asyncio.gather(*(ask(client, [*prefix_of(number % 5), number]) for number in range(100)))
        assert len(answers) == 100
        again = [await ask(client, [*prefix_of(number % 5), 249, number]) for number in range(20)]
        assert all(abs(answer.predicted_cached_tokens - answer.cached_tokens) <= BLOCK for answer in again)
        await fleet.kill("router-1")
        assert len(await asyncio.gather(*(ask(client, prefix_of(number % 5)) for number in range(20)))) == 20


async def test_explanations_before_and_after(own_server: NatsServer) -> None:
    async with (
        fleet_of(own_server.url, prefill=2, decode=1, policy="kv_aware") as (fleet, client),
        Bus.connect(fleet.broker, "listener") as bus,
    ):
        answer = await ask(client, prefix_of(1))
        after = await client.explain(request_id=answer.request_id)
        assert after.lane.startswith(answer.prefill_worker)
        assert len(after.considered) == 2

        sent: list[RawMessage] = []
        await bus.subscribe("jw.requests.>", sent.append)
        before = await client.explain(prefix_of(1), max_tokens=2)
        assert before.lane.startswith(answer.prefill_worker)
        assert before.predicted_cached_tokens == 19 * BLOCK
        assert before.considered[0].score < before.considered[1].score
        assert "304 of 320 tokens cached" in before.considered[0].words
        await bus.flush()
        assert not sent

        with pytest.raises(NoWorker, match="remembers nobody-knows"):
            await client.explain(request_id="nobody-knows")


async def test_short_prompts_may_skip_the_prefill_worker_and_long_ones_do_not(own_server: NatsServer) -> None:
    options = {"direct_max_new_tokens": 64}
    async with fleet_of(own_server.url, prefill=1, decode=1, policy="kv_aware", router=options, timing=DYNAMO_DEFAULT) as (fleet, client):
        short, long = await ask(client, prefix_of(1, 40)), await ask(client, prefix_of(2, 400))
        assert (short.prefill_worker, short.decode_worker, short.kv_bytes) == ("decode-1", "decode-1", 0)
        assert (long.prefill_worker, long.decode_worker, long.kv_bytes > 0) == ("prefill-1", "decode-1", True)
        cached_there = await ask(client, [*prefix_of(2, 400), *[3] * 20])
        assert cached_there.prefill_worker == "decode-1", "what it pulled is in its cache, so little is new"
        assert cached_there.cached_tokens == cached_there.predicted_cached_tokens == 400
        assert all(engine.stats().used_blocks == 0 for engine in fleet.engines.values())


async def test_a_decode_worker_tells_what_it_caches_once_a_router_wants_to_know(own_server: NatsServer) -> None:
    """The first router sends it no prompts and does not ask. The second one does, and knows what was cached before."""
    async with (
        fleet_of(own_server.url, prefill=1, decode=1, policy="kv_aware", timing=DYNAMO_DEFAULT) as (fleet, client),
        Bus.connect(fleet.broker, "listener") as bus,
    ):
        told: dict[str, list[int]] = {"prefill-1": [], "decode-1": []}

        def hear(message: RawMessage) -> None:
            events = decode(message.data, KvEvents)
            told[events.worker].append(events.number)

        await bus.subscribe(subjects.KV_EVENTS, hear)
        await ask(client, prefix_of(1, 400))
        await until(lambda: bool(told["prefill-1"]))
        await fleet.stop("router-1")
        fleet.start_router("router-2", policy="kv_aware", direct_max_new_tokens=64)
        answer = await ask(client, [*prefix_of(1, 400), *[3] * 20])
        assert (answer.prefill_worker, answer.cached_tokens, answer.predicted_cached_tokens) == ("decode-1", 400, 400)
        await until(lambda: bool(told["decode-1"]))
        assert told["decode-1"][0] > 1, "what it cached before was told by nobody's wish"


async def test_what_waits_behind_others_is_taken_back_when_a_worker_comes_to_idle(own_server: NatsServer) -> None:
    """All jobs are queued on the only worker there is; a second one comes, and gets work that was not meant for it."""
    options = {"slots": 1, "timing": PolynomialTiming((0.0, 1.0, 0.0), (0.0, 0.0, 1.0))}  # a millisecond for each token
    keep_none = {"hold_s": 0.0}
    async with fleet_of(own_server.url, prefill=1, decode=1, policy="kv_aware", router=keep_none, **options) as (fleet, client):
        for _ in range(3):
            await ask(client, prefix_of(9, 20))  # the router learns what a prefill takes
        waiting = [asyncio.create_task(ask(client, prefix_of(number, 800))) for number in range(8)]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        fleet.start_worker("prefill", "prefill-2", **options)
        answers = await asyncio.gather(*waiting)
        moved = [answer for answer in answers if answer.attempts > 1]
        assert moved
        assert {answer.prefill_worker for answer in moved} == {"prefill-2"}
        assert all(len(answer.token_ids) == 2 for answer in answers)


async def test_interactive_requests_do_not_queue_behind_batch_and_batch_is_not_starved(own_server: NatsServer) -> None:
    """Sixty batch requests are there first; of the interactive ones that come then, none waits for more than what runs."""
    timing = PolynomialTiming((0.0, 0.1, 0.0), (0.0, 0.0, 1.0))  # 20 ms for a prompt of these
    async with fleet_of(own_server.url, prefill=1, decode=1, policy="kv_aware", slots=2, timing=timing) as (_, client):
        done: list[str] = []

        async def one(number: int, priority_class: str) -> None:
            await client.generate(prefix_of(number, 200), max_tokens=2, temperature=0.0, priority_class=priority_class)
            done.append(priority_class)

        async with asyncio.TaskGroup() as tasks:
            batch = [tasks.create_task(one(number, "batch")) for number in range(60)]
            await asyncio.wait(batch, return_when=asyncio.FIRST_COMPLETED)
            for number in range(100, 110):
                tasks.create_task(one(number, "interactive"))
        last_interactive = max(place for place, priority_class in enumerate(done) if priority_class == "interactive")
        assert done[:last_interactive].count("batch") < 40
        assert done.count("batch") == 60


async def test_what_is_cancelled_while_the_router_keeps_it_leaves_no_load_behind(own_server: NatsServer) -> None:
    """Its turn comes, and it is not sent: what was booked for it must not count for ever."""
    slow = PolynomialTiming(prefill_ms=(0, 0, 400), decode_ms=(0, 0, 1))
    async with fleet_of(own_server.url, prefill=1, decode=1, policy="kv_aware", timing=slow) as (_, client):
        first = await client.submit([1] * 40, max_tokens=2)
        kept = [await client.submit([number] * 40, max_tokens=2) for number in range(2, 8)]
        for one in kept:
            await one.cancel()
        ends = await asyncio.gather(*(one.answer() for one in [first, *kept]), return_exceptions=True)
        assert any(isinstance(end, RequestCancelled) for end in ends)
        async with asyncio.timeout(10):
            while "0 queued, 0 running" not in (await client.explain([9] * 40)).considered[0].words:
                await asyncio.sleep(0.05)
