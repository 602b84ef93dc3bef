"""The broker's own faults, on a real one: restarts, a lost store, what an operator deletes, full streams, partitions, slow readers."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fleet import fleet_of
from operations import all_ready, cards_live_long, idle, until, until_held

from jetwake.consumers.simulated_settings import SimulatedSettings
from jetwake.consumers.timing import DYNAMO_DEFAULT
from jetwake.deploy.chaos.expected import simulated_answer
from jetwake.deploy.chaos.freezing import freeze, thaw
from jetwake.deploy.chaos.links import Link
from jetwake.deploy.nats_server import NatsServer
from jetwake.pipeline import connection, replies
from jetwake.pipeline.catalogue import ModelCatalogue
from jetwake.pipeline.connection import Bus, RawMessage
from jetwake.pipeline.jetstream import api
from jetwake.pipeline.publish import Publisher
from jetwake.pipeline.registry import Registry
from jetwake.pipeline.settings import BrokerSettings, TopologySettings
from jetwake.pipeline.topology import delete_consumer, drift, durables, ensure_topology, stream_counts
from jetwake.producers import takeover
from jetwake.producers.client import Answer, Client
from jetwake.schemas import streams, subjects
from jetwake.schemas.codec import decode
from jetwake.schemas.errors import BusError, DeadlineExceeded, Overloaded, RequestCancelled
from jetwake.schemas.replies import Reply, TokenChunk
from jetwake.schemas.requests import Sampling
from jetwake.schemas.streams import BUCKETS, HANDOFF, PREFILL, STREAMS
from jetwake.schemas.workers import WorkerCard

MODEL = "sim"
LIMITS = SimulatedSettings(model=MODEL).limits()
PATIENCE_S = 90.0
ANSWER = {"max_tokens": 60, "temperature": 0.0}
SLOW = replace(DYNAMO_DEFAULT, decode_ms=(0.0, 0.0, 2.0))
"""An answer takes an eighth of a second: while one is there, the others wait or run."""
IN_MEMORY = [spec.name for spec in STREAMS if spec.storage == "memory"] + ["KV_jw_workers"]


def prompt_of(number: int, length: int = 40) -> list[int]:
    return [number % 30_000, *(token % 250 for token in range(length - 1))]


async def ask(client: Client, number: int, **options: Any) -> Answer:
    return await client.generate(prompt_of(number), **{"model": MODEL, **ANSWER, **options})


async def answered_right(client: Client, number: int) -> None:
    """One request through everything there is, with the right answer."""
    async with asyncio.timeout(PATIENCE_S):
        answer = await ask(client, number)
    assert answer.token_ids == simulated_answer(LIMITS, prompt_of(number), Sampling(**ANSWER))


async def all_right(waiting: list[asyncio.Task[Answer]]) -> None:
    """Every answer came, and is the right one. `waiting` are those of numbers 0, 1, 2, ..."""
    async with asyncio.timeout(PATIENCE_S):
        answers = await asyncio.gather(*waiting)
    for number, answer in enumerate(answers):
        assert answer.token_ids == simulated_answer(LIMITS, prompt_of(number), Sampling(**ANSWER)), number


def many(client: Client, count: int = 30) -> list[asyncio.Task[Answer]]:
    return [asyncio.create_task(ask(client, number)) for number in range(count)]


@asynccontextmanager
async def operator(url: str) -> AsyncGenerator[Bus]:
    async with Bus.connect(BrokerSettings(url=url), "operator") as bus:
        yield bus


async def is_whole(bus: Bus) -> None:
    """Returns when every stream, shared consumer and bucket is as declared, and the model is known."""
    catalogue = ModelCatalogue(bus, Publisher(bus))
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                if not await drift(bus, TopologySettings()) and await catalogue.get(MODEL) is not None:
                    return
            except BusError:
                await bus.wait_connected()
            await asyncio.sleep(0.05)


# -- restarts ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["terminate", "kill"])
async def test_a_broker_that_restarts_under_load_loses_nothing(own_server: NatsServer, how: str) -> None:
    """Its store is kept; what it had in memory (replies, cancels, worker cards) is gone, and made again without any restart of ours."""
    async with fleet_of(own_server.url, prefill=1, decode=1, slots=8, timing=SLOW) as (_, client), operator(own_server.url) as bus:
        waiting = many(client)
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        await (own_server.kill() if how == "kill" else own_server.stop())
        await own_server.start()
        await all_right(waiting)
        await is_whole(bus)
        await answered_right(client, 1000)


async def test_after_a_restart_a_cancel_still_reaches_whoever_generates(own_server: NatsServer) -> None:
    async with fleet_of(own_server.url, prefill=1, decode=1, timing=SLOW) as (fleet, client), operator(own_server.url) as bus:
        submitted = await client.submit(prompt_of(1), max_tokens=20_000)
        pieces = aiter(submitted)
        await anext(pieces)
        await own_server.restart()
        await is_whole(bus)
        await submitted.cancel()
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(RequestCancelled):
                await submitted.answer()
            for engine in fleet.engines.values():
                await engine.drain()


async def test_after_the_loss_of_its_store_the_broker_is_made_whole_and_serves(
    own_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waited in it is gone, and ends for its client by the deadline at the latest; everything later is served."""
    monkeypatch.setattr(replies, "DEADLINE_GRACE_S", 1.0)
    async with fleet_of(own_server.url, prefill=1, decode=1, slots=2, timing=SLOW) as (_, client), operator(own_server.url) as bus:
        waiting = [asyncio.create_task(ask(client, number, timeout_s=3.0)) for number in range(30)]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        await own_server.restart(empty_store=True)
        await is_whole(bus)
        async with Client.connect(own_server.url) as newcomer:
            await answered_right(newcomer, 1000)
        async with asyncio.timeout(PATIENCE_S):
            outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(outcome, Answer | DeadlineExceeded) for outcome in outcomes), outcomes


async def test_a_deadline_that_passes_while_the_broker_is_frozen_ends_the_request_and_no_worker(
    own_server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The prefill worker, which keeps the blocks, is the one that notices; for so long as it tries, nobody hears it."""
    caplog.set_level(logging.WARNING)
    worker = {"stall_limit_s": 300}
    async with fleet_of(own_server.url, aggregated=1, worker=worker) as (fleet, client):
        fleet.start_worker("prefill", "prefill-1", worker, broker={"publish_deadline_s": 1.0, "request_timeout_s": 0.5})
        fleet.start_worker("decode", "decode-1", worker, slots=1)
        await all_ready(fleet, 3)
        await fleet.stop("aggregated-1")
        fleet.forget("aggregated-1")
        fleet.engines["decode-1"].stall()
        first = await client.submit(prompt_of(1), model=MODEL, **ANSWER)
        await until(lambda: fleet.engines["decode-1"].stats().counters.get("pulled_requests", 0) == 1)
        async with asyncio.timeout(PATIENCE_S):
            while await fleet.engines["prefill-1"].held():  # of the first, whose pull it has not heard of
                await asyncio.sleep(0.005)
        second = await client.submit(prompt_of(2), model=MODEL, timeout_s=4.0, **ANSWER)
        await until_held(fleet, "prefill-1", 1)
        await freeze(own_server.pid)
        try:
            async with asyncio.timeout(PATIENCE_S):
                while f"{second.request.request_id}: deadline passed while its handoff waited" not in caplog.text:
                    await asyncio.sleep(0.05)
                    fleet.check()
        finally:
            thaw(own_server.pid)
        fleet.engines["decode-1"].go_on()
        async with asyncio.timeout(PATIENCE_S):
            assert len((await first.answer()).token_ids) == ANSWER["max_tokens"]
            with pytest.raises(DeadlineExceeded):
                await second.answer()
        await answered_right(client, 3)
        await idle(fleet)


async def test_workers_with_more_to_say_than_fits_while_the_broker_is_away_go_on(
    own_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays away until every answer that was running has come to nothing, or to its end."""
    async with fleet_of(own_server.url, prefill=1, decode=1, slots=8, timing=SLOW) as (fleet, client):
        for part in ("router-1", "prefill-1", "decode-1"):
            await fleet.stop(part)
        monkeypatch.setattr(connection, "_PUBLISH_BUFFER_BYTES", 4096)
        fleet.start_router("router-2")
        fleet.start_worker("prefill", "prefill-2", slots=8, timing=SLOW)
        fleet.start_worker("decode", "decode-2", slots=8, timing=SLOW)
        waiting = many(client, 20)
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        await own_server.kill()
        await until(lambda: not fleet.engines["decode-2"].stats().running_requests)
        await own_server.start()
        await all_right(waiting)
        fleet.check()
        await fleet.kill_all()  # blocks of handoffs that may have been stored keep their lease for a while: a drain would wait


# -- what an operator deletes -----------------------------------------------------------------------------------------------


async def test_a_deleted_stream_comes_back_and_work_goes_on(own_server: NatsServer) -> None:
    """Each of them, one after the other, under the same fleet: none may need a restart of ours."""
    async with fleet_of(own_server.url, prefill=1, decode=1) as (fleet, client), operator(own_server.url) as bus:
        for number, stream in enumerate([spec.name for spec in STREAMS] + [f"KV_{bucket.name}" for bucket in BUCKETS]):
            try:
                await api(bus, f"STREAM.DELETE.{stream}")
                await is_whole(bus)
                await answered_right(client, number)
                fleet.check()
            except Exception as error:
                error.add_note(f"after the loss of {stream}")
                raise


@pytest.mark.parametrize("stream", IN_MEMORY)
async def test_deleting_what_holds_no_accepted_work_costs_no_request(own_server: NatsServer, stream: str) -> None:
    async with fleet_of(own_server.url, prefill=1, decode=1, slots=8, timing=SLOW) as (_, client), operator(own_server.url) as bus:
        waiting = many(client)
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        await api(bus, f"STREAM.DELETE.{stream}")
        await all_right(waiting)


async def test_deleted_consumers_come_back_and_no_request_is_lost(own_server: NatsServer) -> None:
    """All of them, while messages wait in all of the queues and are held by their consumers."""
    async with fleet_of(own_server.url, prefill=1, decode=1, slots=2, timing=SLOW) as (fleet, client), operator(own_server.url) as bus:
        waiting = many(client, 20)
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for stream in ("JW_HANDOFF", "JW_PREFILL", "JW_REQUESTS"):
            for durable in (await api(bus, f"CONSUMER.NAMES.{stream}"))["consumers"]:
                assert await delete_consumer(bus, stream, durable)
        await all_right(waiting)
        await fleet.kill_all()  # blocks handed off by the incarnations that ended keep their lease for a while: a drain would wait


async def test_dead_workers_leave_no_consumer_behind(own_server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty deaths, each followed by the next incarnation of the same name."""
    monkeypatch.setattr(takeover, "EMPTY_LANE_AFTER_S", 1.0)
    async with fleet_of(own_server.url, aggregated=2) as (fleet, client), operator(own_server.url) as bus:
        lanes: set[str] = set()
        async with asyncio.timeout(PATIENCE_S):
            for _ in range(20):
                while not (new := {*await durables(bus, "JW_PREFILL")} - lanes) or not any(lane.startswith("aggregated-2") for lane in new):
                    await asyncio.sleep(0.01)
                lanes |= new
                await fleet.kill("aggregated-2")
                fleet.start_worker("aggregated", "aggregated-2")
            await fleet.stop("aggregated-2")
            while len(left := await durables(bus, "JW_PREFILL")) > 1:
                await asyncio.sleep(0.05)
        assert len(lanes) == 21
        assert left[0].startswith("aggregated-1")
        assert await drift(bus, TopologySettings()) == []
        await answered_right(client, 1)


# -- full, cut off, slow ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [{"max_requests": 10}, {"requests_max_bytes": 1 << 20}])
async def test_a_full_request_stream_refuses_and_what_it_took_is_answered(own_server: NatsServer, limit: dict[str, int]) -> None:
    """By messages or by bytes: of prompts of 90 KB, eleven fit in 1 MB."""
    accepted, length = (10, 40) if "max_requests" in limit else (11, 22_500)
    async with fleet_of(own_server.url, prefill=1, decode=1) as (fleet, client), operator(own_server.url) as bus:
        await fleet.stop("router-1")
        await ensure_topology(bus, TopologySettings(**limit))
        waiting = [asyncio.create_task(client.generate(prompt_of(number, length), **ANSWER)) for number in range(30)]
        async with asyncio.timeout(PATIENCE_S):
            while sum(task.done() for task in waiting) < 30 - accepted:
                await asyncio.sleep(0.01)
        assert (await stream_counts(bus))["JW_REQUESTS"].messages == accepted
        assert {type(task.exception()) for task in waiting if task.done()} == {Overloaded}
        fleet.start_router("router-2")
        async with asyncio.timeout(PATIENCE_S):
            answers = await asyncio.gather(*(task for task in waiting if not task.done()))
        assert len(answers) == accepted
        assert all(len(answer.token_ids) == ANSWER["max_tokens"] for answer in answers)


async def test_with_tiny_queues_everything_accepted_is_answered(own_server: NatsServer) -> None:
    async with fleet_of(own_server.url, prefill=2, decode=1, slots=4) as (_, client), operator(own_server.url) as bus:
        await ensure_topology(bus, TopologySettings(max_jobs_per_worker=1, max_handoffs=1))
        await all_right(many(client, 6))


@pytest.mark.parametrize(("role", "manner"), [("prefill", "silent"), ("decode", "cut"), ("decode", "silent")])
async def test_what_a_partitioned_worker_had_is_answered_once_and_its_late_words_do_no_harm(
    own_server: NatsServer, monkeypatch: pytest.MonkeyPatch, role: str, manner: str
) -> None:
    """The partition lasts until others have answered everything; then it heals, and the worker comes back with its old work in hand."""
    monkeypatch.setattr(streams, "DECODE_ACK_WAIT_S", 2)  # for so long nobody gets what the cut-off worker holds
    options = {"slots": 4, "timing": SLOW}
    async with (
        Link("partition", own_server.port) as link,
        fleet_of(own_server.url, prefill=1, decode=1, **options) as (fleet, client),
        operator(own_server.url) as bus,
    ):
        fleet.start_worker(role, "cut-off", url=link.url, **options)
        registry = Registry(bus)
        await registry.start()
        running = asyncio.create_task(registry.run())
        await registry.wait_for(lambda workers: "cut-off" in workers and all_greeted(workers), PATIENCE_S)
        terminals: list[str] = []
        await bus.subscribe(subjects.replies_of(client.name), lambda raw: terminals.extend(terminal_id(raw)))
        waiting = many(client, 40)
        async with asyncio.timeout(PATIENCE_S):
            while fleet.engines["cut-off"].stats().running_requests < 2:
                await asyncio.sleep(0.005)
        link.cut() if manner == "cut" else link.silence()
        await all_right(waiting)
        link.heal()
        await registry.wait_for(lambda workers: "cut-off" in workers, PATIENCE_S)
        await answered_right(client, 1000)
        async with asyncio.timeout(PATIENCE_S):
            while fleet.engines["cut-off"].stats().running_requests:
                await asyncio.sleep(0.05)
        assert sorted(terminals) == sorted(set(terminals))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_router_that_loses_the_broker_amid_a_takeover_goes_on(own_server: NatsServer, caplog: pytest.LogCaptureFixture) -> None:
    """A hundred jobs wait for a worker that died; the router that moves them is cut off when it has begun to."""
    caplog.set_level(logging.WARNING)  # whatever libraries set in this process before
    async with (
        Link("router", own_server.port) as link,
        fleet_of(own_server.url, aggregated=1, slots=1) as (fleet, client),
        operator(own_server.url) as bus,
    ):
        fleet.engines["aggregated-1"].stall()
        submitted = [await client.submit(prompt_of(number), **ANSWER) for number in range(100)]
        await fleet.stop("router-1")
        fleet.start_router("router-2", url=link.url, broker={"request_timeout_s": 1.0})
        await fleet.kill("aggregated-1")
        async with asyncio.timeout(PATIENCE_S):
            while not any(name.startswith("takeover-") for name in await durables(bus, "JW_PREFILL")):
                await asyncio.sleep(0.005)
            link.silence()
            while "cannot look for queues of dead workers now" not in caplog.text:
                await asyncio.sleep(0.05)
                fleet.check()
        link.heal()
        fleet.start_worker("aggregated", "aggregated-2")
        async with asyncio.timeout(PATIENCE_S):
            answers = [await each.answer() for each in submitted]
        assert all(len(answer.token_ids) == ANSWER["max_tokens"] for answer in answers)


async def test_a_handoff_whose_confirmation_comes_too_late_keeps_its_blocks(
    own_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is sent again, the broker calls that a duplicate, and the first copy is the one that is pulled, later."""
    cards_live_long(monkeypatch)
    copies: list[RawMessage] = []
    patience_s = 1.0
    async with (
        Link("prefill", own_server.port) as link,
        fleet_of(own_server.url, prefill=1, decode=1) as (fleet, client),
        operator(own_server.url) as bus,
    ):
        fleet.start_worker("prefill", "linked", url=link.url, broker={"request_timeout_s": patience_s})
        await until(lambda: fleet.engines["linked"].stats().capacity_blocks > 0)
        await fleet.stop("prefill-1")
        fleet.forget("prefill-1")
        await answered_right(client, 1)
        engine = fleet.engines["linked"]
        engine.stall()
        submitted = await client.submit(prompt_of(2), **ANSWER)
        await until(lambda: engine.stats().running_requests > 0)
        [durable] = await durables(bus, HANDOFF.name)
        await api(bus, f"CONSUMER.PAUSE.{HANDOFF.name}.{durable}", {"pause_until": "2100-01-01T00:00:00Z"})
        await bus.subscribe("jw.handoff.>", copies.append)
        await bus.flush()
        link.silence()
        engine.go_on()
        await asyncio.sleep(patience_s + 0.5)  # for so long the worker waits before it sends again
        link.heal()
        await until(lambda: len(copies) >= 2)
        async with asyncio.timeout(PATIENCE_S):
            while (await stream_counts(bus))[PREFILL.name].messages:
                await asyncio.sleep(0.02)
        assert engine.stats().counters.get("leases_released", 0) == 0
        await api(bus, f"CONSUMER.PAUSE.{HANDOFF.name}.{durable}", {"pause_until": "2000-01-01T00:00:00Z"})
        await answered_right(client, 3)  # the broker sends on at the next handoff, or some seconds later
        async with asyncio.timeout(PATIENCE_S):
            answer = await submitted.answer()
        assert (answer.attempts, answer.token_ids) == (1, simulated_answer(LIMITS, prompt_of(2), Sampling(**ANSWER)))


async def test_a_reader_that_the_broker_cut_off_for_being_slow_hears_everything(tmp_path: Path) -> None:
    """Behind a silent link nothing is read; the broker's patience with such a reader is 100 ms, or 1 MB."""
    settings = f'write_deadline: "100ms"\nmax_pending: {1 << 20}'
    async with NatsServer(tmp_path / "nats", sync_always=False, max_payload_bytes=1 << 20, extra_config=settings) as server:
        async with Bus.connect(BrokerSettings(url=server.url), "topology") as bus:
            await ensure_topology(bus, TopologySettings())
        async with (
            fleet_of(server.url, prefill=1, decode=1, timing=DYNAMO_DEFAULT),  # most of it is still to come when all are sent
            Link("slow", server.port, receive_bytes=1 << 14) as link,
            Client.connect(link.url) as reader,
        ):
            options = {"model": MODEL, "max_tokens": 400, "temperature": 0.0, "logprobs": 20}
            await answered_right(reader, 1000)
            submitted = [await reader.submit(prompt_of(number), **options) for number in range(16)]
            link.silence()
            async with asyncio.timeout(PATIENCE_S):
                while "Slow Consumer" not in await asyncio.to_thread(server.log_file.read_text):
                    await asyncio.sleep(0.05)
            link.heal()
            async with asyncio.timeout(PATIENCE_S):
                answers = await asyncio.gather(*(each.answer() for each in submitted))
            assert all(len(answer.token_ids) == len(answer.logprobs) == 400 for answer in answers)


def terminal_id(raw: RawMessage) -> list[str]:
    reply: Any = decode(raw.data, Reply)  # type: ignore[arg-type]
    return [] if isinstance(reply, TokenChunk) else [reply.request_id]


def all_greeted(workers: Mapping[str, WorkerCard]) -> bool:
    prefill = {card.lane for card in workers.values() if card.role == "prefill"}
    return all(prefill <= set(card.peers) for card in workers.values() if card.role == "decode")


async def test_a_handoff_that_comes_to_two_workers_is_pulled_once(own_server: NatsServer) -> None:
    """A consumer that was made anew gives what it had given already, and counts it as a first delivery. The one slot of the first is taken."""
    async with fleet_of(own_server.url, prefill=1, decode=2, slots=1, timing=SLOW) as (fleet, client), operator(own_server.url) as bus:
        for number in range(3):
            submitted = await client.submit([number] * 70, max_tokens=300, temperature=0.0)
            pieces = aiter(submitted)
            await anext(pieces)
            await anext(pieces)  # the second token is a decode worker's: it has pulled
            [pool] = await durables(bus, HANDOFF.name)
            assert await delete_consumer(bus, HANDOFF.name, pool)
            assert (await submitted.answer()).attempts >= 1
        counters = [engine.stats().counters for engine in fleet.engines.values()]
        assert sum(one.get("pulled_requests", 0) for one in counters) <= sum(one.get("prefilled_requests", 0) for one in counters)
