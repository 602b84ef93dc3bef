"""The standing pull on a real server: credit, one settlement each, and what happens when things go away."""

import asyncio
import random
from dataclasses import replace

import pytest

from jetwake.deploy.nats_server import NatsServer
from jetwake.pipeline.connection import Bus
from jetwake.pipeline.consume import Delivery
from jetwake.pipeline.jetstream import last_message
from jetwake.pipeline.publish import Publisher
from jetwake.pipeline.settings import BrokerSettings, TopologySettings
from jetwake.pipeline.settling import reply_target
from jetwake.pipeline.topology import consumer_counts, delete_consumer, ensure_consumer, ensure_topology, subject_counts
from jetwake.schemas import subjects
from jetwake.schemas.codec import decode
from jetwake.schemas.errors import EngineRefused, NoWorker, PullFailed, RequestCancelled, Undecodable
from jetwake.schemas.prefill import PrefillJob
from jetwake.schemas.replies import DeadLetter, Failed
from jetwake.schemas.streams import DEAD, PREFILL, RESULTS

from .harness import PATIENCE_S, Worker, request, until


async def queued(bus: Bus, lane: str) -> int:
    """Messages of the lane still stored: held or not."""
    return (await subject_counts(bus, PREFILL.name)).get(subjects.prefill(lane), 0)


async def until_queued(bus: Bus, lane: str, wanted: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await queued(bus, lane) != wanted:
            await asyncio.sleep(0.01)


async def test_messages_are_handled_once_and_leave_the_queue(bus: Bus, unique: str) -> None:
    worker = Worker(bus, unique)
    ids = [f"r{n}" for n in range(50)]
    await worker.put(*ids)
    async with worker.running_consumer():
        await until_queued(bus, unique, 0)
    assert sorted(worker.handled_ids) == sorted(ids)
    assert worker.most_running <= worker.slots


async def test_no_more_is_asked_for_than_there_is_room(bus: Bus, unique: str) -> None:
    gate = asyncio.Event()
    worker = Worker(bus, unique, slots=3, behave=lambda _: gate.wait())  # type: ignore[arg-type, return-value]
    await worker.put(*[f"r{n}" for n in range(10)])
    async with worker.running_consumer() as consumer:
        await until(lambda: worker.running == 3)
        count = (await consumer_counts(bus))[subjects.prefill(unique)]
        assert (count.pending, count.in_progress, consumer.in_hand, consumer.fetching) == (7, 3, 3, False)
        gate.set()
        await until_queued(bus, unique, 0)
    assert worker.most_running == 3


async def test_what_is_held_by_others_never_fills_up_a_consumer(own_server: NatsServer) -> None:
    """More messages in hand than brokers allow by default: as after many workers died with their slots full."""
    gate, many = asyncio.Event(), 1500
    async with Bus.connect(BrokerSettings(url=own_server.url), "many") as bus:
        await ensure_topology(bus, TopologySettings(max_jobs_per_worker=many))
        worker = Worker(bus, "lane", slots=many, behave=lambda _: gate.wait())  # type: ignore[arg-type, return-value]
        await worker.put(*[f"r{n}" for n in range(many)])
        async with worker.running_consumer():
            await until(lambda: worker.running == many)
            gate.set()
            await until_queued(bus, "lane", 0)


async def test_room_that_shrinks_takes_back_what_was_asked_for(bus: Bus, unique: str) -> None:
    worker = Worker(bus, unique, slots=4)
    async with worker.running_consumer() as consumer:
        await until(lambda: consumer.fetching)
        worker.paused = True
        consumer.room_changed()
        await until(lambda: not consumer.fetching)
        await bus.flush()
        await worker.put("r1")
        assert (await consumer_counts(bus))[subjects.prefill(unique)].in_progress == 0
        worker.paused = False
        consumer.room_changed()
        await until_queued(bus, unique, 0)
    assert worker.handled_ids == ["r1"]
    assert worker.handled[0].deliveries == 1


async def test_room_that_shrinks_keeps_the_rest(bus: Bus, unique: str) -> None:
    worker = Worker(bus, unique, slots=4)
    async with worker.running_consumer() as consumer:
        await until(lambda: consumer.outstanding == 4)
        worker.slots = 1
        consumer.room_changed()
        await until(lambda: consumer.outstanding == 1)
        await worker.put(*[f"r{n}" for n in range(20)])
        await until_queued(bus, unique, 0)
    assert worker.most_running == 1
    assert all(delivery.deliveries == 1 for delivery in worker.handled)


async def test_messages_that_fill_a_pull_by_size_keep_flowing(bus: Bus, unique: str) -> None:
    worker = Worker(bus, unique, slots=50)
    large = request().model_copy(update={"prompt_tokens": bytes(4 << 20)})
    for n in range(12):  # 48 MB, and one pull carries 16
        job = PrefillJob(request=large, router="router")
        await worker.publisher.store(subjects.prefill(unique), job, message_id=f"{unique}:{n}")
    async with worker.running_consumer():
        await until_queued(bus, unique, 0)
    assert [delivery.deliveries for delivery in worker.handled] == [1] * 12


async def test_work_longer_than_the_ack_wait_is_done_once(bus: Bus, unique: str) -> None:
    worker = Worker(bus, unique, ack_wait_s=0.6, behave=lambda _: asyncio.sleep(2.0))
    await worker.put("long")
    async with worker.running_consumer():
        await until_queued(bus, unique, 0)
    assert worker.handled_ids == ["long"]


@pytest.mark.parametrize(
    ("error", "handled", "failed"),
    [(EngineRefused("bad"), 1, True), (RequestCancelled("gone"), 1, False), (PullFailed("cut"), 3, True), (ValueError("bug"), 3, True)],
)
async def test_an_error_settles_the_message_by_the_table(bus: Bus, unique: str, error: Exception, handled: int, failed: bool) -> None:
    async def behave(_: Delivery[PrefillJob]) -> None:
        raise error

    worker = Worker(bus, unique, behave=behave)
    await worker.put("r1")
    async with worker.running_consumer():
        await until_queued(bus, unique, 0)
    assert [delivery.deliveries for delivery in worker.handled] == list(range(1, handled + 1))
    assert [request_id for request_id, _ in worker.failed] == (["r1"] if failed else [])


async def test_an_undecodable_part_found_by_the_handler_is_told_to_the_client(bus: Bus, unique: str) -> None:
    async def behave(_: Delivery[PrefillJob]) -> None:
        raise Undecodable("odd token bytes")

    worker = Worker(bus, unique, behave=behave)
    await worker.put("r1")
    async with worker.running_consumer():
        await until_queued(bus, unique, 0)
    assert [request_id for request_id, _ in worker.failed] == ["r1"]


async def test_room_that_nobody_announced_is_found(bus: Bus, unique: str) -> None:
    worker = Worker(bus, unique, paused=True)
    await worker.put("r1")
    async with worker.running_consumer() as consumer:
        await bus.flush()
        assert not consumer.fetching
        worker.paused = False
        await until_queued(bus, unique, 0)


async def test_not_now_comes_again_without_limit(bus: Bus, unique: str) -> None:
    async def behave(_: Delivery[PrefillJob]) -> None:
        if len(worker.handled) < 5:
            raise NoWorker("later")
        if len(worker.handled) < 6:
            raise PullFailed("cut")

    worker = Worker(bus, unique, max_deliveries=2, behave=behave)
    await worker.put("r1")
    async with worker.running_consumer():
        await until_queued(bus, unique, 0)
    assert len(worker.handled) == 6
    assert worker.failed == []


async def test_a_message_that_exhausted_its_deliveries_is_kept_for_an_operator(bus: Bus, unique: str) -> None:
    async def behave(_: Delivery[PrefillJob]) -> None:
        raise PullFailed(f"cut {unique}")

    worker = Worker(bus, unique, max_deliveries=1, behave=behave)
    await worker.put("r1")
    async with worker.running_consumer():
        await until_queued(bus, unique, 0)
    letter = await last_message(bus, DEAD.name, subjects.dead("prefill"))
    assert letter is not None
    dead = decode(letter.data, DeadLetter)
    assert (dead.text, dead.code, dead.worker, dead.deliveries) == (f"cut {unique}", "pull_failed", "w1", 1)


async def test_bytes_that_are_no_message_become_a_dead_letter_and_a_failed_reply(bus: Bus, publisher: Publisher, unique: str) -> None:
    worker = Worker(bus, unique)
    headers = {subjects.REQUEST_ID_HEADER: f"tiny.gw.{unique}"}
    await publisher.store_bytes(subjects.prefill(unique), b"\xc1junk", message_id=unique, headers=headers)
    async with worker.running_consumer():
        await until_queued(bus, unique, 0)
    letter = await last_message(bus, DEAD.name, subjects.dead("prefill"))
    result = await last_message(bus, RESULTS.name, subjects.result("tiny", "gw", unique))
    assert letter is not None
    assert result is not None
    assert decode(letter.data, DeadLetter).payload == b"\xc1junk"
    assert decode(result.data, Failed).code == "undecodable"
    assert worker.handled == []


async def test_a_clients_header_is_not_taken_for_the_brokers_word(bus: Bus, publisher: Publisher, unique: str) -> None:
    worker = Worker(bus, unique)
    job = PrefillJob(request=request(), router="router")
    await publisher.store(subjects.prefill(unique), job, message_id=unique, headers={"Status": "409", "Description": "Consumer Deleted"})
    async with worker.running_consumer():
        await until_queued(bus, unique, 0)
    assert worker.handled_ids == ["r1"]


async def test_stopping_lets_work_end_within_the_grace_period(bus: Bus, unique: str) -> None:
    gate = asyncio.Event()
    worker = Worker(bus, unique, slots=2, behave=lambda _: gate.wait())  # type: ignore[arg-type, return-value]
    await worker.put("r1", "r2", "r3")
    async with asyncio.TaskGroup() as tasks:
        run = tasks.create_task(worker.consumer.run())
        await until(lambda: worker.running == 2)
        stopping = tasks.create_task(worker.consumer.stop(grace_s=PATIENCE_S))
        await until(lambda: not worker.consumer.fetching)
        gate.set()
        await asyncio.gather(stopping, run)
    assert await queued(bus, unique) == 1
    assert sorted(worker.handled_ids) == ["r1", "r2"]


@pytest.mark.parametrize("how", ["stop", "cancel"])
async def test_what_is_in_hand_goes_back_at_once(bus: Bus, unique: str, how: str) -> None:
    worker = Worker(bus, unique, slots=2, behave=lambda _: asyncio.sleep(PATIENCE_S))
    await worker.put("r1", "r2", "r3")
    run = asyncio.create_task(worker.consumer.run())
    await until(lambda: worker.running == 2)
    if how == "stop":
        await worker.consumer.stop(grace_s=0.0)
    else:
        run.cancel()
    await asyncio.wait([run])
    other = Worker(bus, unique)
    async with other.running_consumer():
        async with asyncio.timeout(3.0):  # far below the ack wait of ten seconds
            await until_queued(bus, unique, 0)
    assert sorted(other.handled_ids) == ["r1", "r2", "r3"]


async def test_a_loop_that_is_cancelled_at_random_a_thousand_times_loses_no_message(bus: Bus, unique: str) -> None:
    """While messages arrive, are handled and are settled: what was in hand goes back, and comes again at once."""
    chance, put, runs = random.Random(1), 0, 0

    async def behave(_: Delivery[PrefillJob]) -> None:
        await asyncio.sleep(chance.choice([0, 0, 0.002]))

    worker = Worker(bus, unique, slots=8, behave=behave)
    while (going_on := runs < 1000 or put < 200) or await queued(bus, unique):
        if going_on and await queued(bus, unique) < 100:
            await asyncio.gather(*(worker.put(f"r{number}") for number in range(put, put + 20)))
            put += 20
        running = asyncio.create_task(Worker(bus, unique, slots=8, behave=behave, handled=worker.handled).consumer.run())
        for _ in range(chance.randrange(60)):
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled()
        runs += 1
    assert set(worker.handled_ids) == {f"r{number}" for number in range(put)}


async def test_a_deleted_consumer_is_declared_again(bus: Bus, unique: str) -> None:
    worker = Worker(bus, unique)
    async with worker.running_consumer() as consumer:
        await until(lambda: consumer.fetching)
        await delete_consumer(bus, PREFILL.name, unique)
        await worker.put("r1")
        await until_queued(bus, unique, 0)
    assert worker.handled_ids == ["r1"]


async def test_a_queue_that_was_taken_over_is_not_taken_back(bus: Bus, unique: str) -> None:
    worker = Worker(bus, unique)
    async with worker.running_consumer() as consumer:
        await until(lambda: consumer.fetching)
        await delete_consumer(bus, PREFILL.name, unique)
        await ensure_consumer(bus, replace(worker.spec, durable=f"heir-{unique}"))
        await worker.put("r1")
        await until(lambda: not consumer.fetching)
        assert await queued(bus, unique) == 1
    await delete_consumer(bus, PREFILL.name, f"heir-{unique}")
    assert worker.handled == []


@pytest.mark.parametrize("empty_store", [False, True])
async def test_fetching_goes_on_after_the_broker_restarts(own_server: NatsServer, unique: str, empty_store: bool) -> None:
    async with Bus.connect(BrokerSettings(url=own_server.url), "test") as bus:
        bus.on_reconnect(lambda: _declare(bus))
        worker = Worker(bus, unique)
        async with worker.running_consumer() as consumer:
            await until(lambda: consumer.fetching)
            await own_server.restart(empty_store=empty_store)
            await until(lambda: consumer.fetching)
            await worker.put("r1")
            await until_queued(bus, unique, 0)
        assert worker.handled_ids == ["r1"]


async def _declare(bus: Bus) -> None:
    await ensure_topology(bus, TopologySettings())


async def test_a_job_in_hand_over_a_broker_restart_is_done_once(own_server: NatsServer, unique: str) -> None:
    async with Bus.connect(BrokerSettings(url=own_server.url), "test") as bus:
        gate = asyncio.Event()
        worker = Worker(bus, unique, ack_wait_s=1.0, behave=lambda _: gate.wait())  # type: ignore[arg-type, return-value]
        await worker.put("r1")
        async with worker.running_consumer() as consumer:
            await until(lambda: worker.running == 1)
            await own_server.kill()
            await asyncio.sleep(1.5)  # longer than the ack wait: the restarted broker delivers the job again
            await own_server.start()
            await until(lambda: consumer.fetching)
            await asyncio.sleep(1.5)
            gate.set()
            await until_queued(bus, unique, 0)
        assert worker.handled_ids == ["r1"]


def test_reply_target_reads_only_safe_names() -> None:
    target = reply_target({subjects.REQUEST_ID_HEADER: "tiny.gw.r-1"})
    assert target is not None
    assert (target.model, target.gateway, target.request_id) == ("tiny", "gw", "r-1")
    assert reply_target({subjects.REQUEST_ID_HEADER: "tiny.gw.>"}) is None
    assert reply_target({}) is None


async def test_what_was_in_hand_when_the_store_was_lost_is_let_go(own_server: NatsServer, unique: str) -> None:
    """A consumer that was made anew does not answer about what it has not given: nobody waits for its word."""
    async with Bus.connect(BrokerSettings(url=own_server.url, request_timeout_s=0.3), "test") as bus:
        gate = asyncio.Event()
        worker = Worker(bus, unique, behave=lambda _: gate.wait())  # type: ignore[arg-type, return-value]
        await worker.put("r1", "r2", "r3")
        async with worker.running_consumer() as consumer:
            await until(lambda: worker.running == 3)
            await own_server.restart(empty_store=True)
            await bus.wait_connected()
            await ensure_topology(bus, TopologySettings())
            await worker.put("r4")
            await until(lambda: worker.running == 4)  # its consumer is there again
            gate.set()
            await until(lambda: consumer.in_hand == 0)
            await until_queued(bus, unique, 0)


async def test_what_is_said_late_about_a_lost_queue_concerns_no_message_of_the_new_one(own_server: NatsServer, unique: str) -> None:
    """The handlers of a queue that is gone end when as many messages of the one made anew are in hand, with the same worker's name."""
    async with Bus.connect(BrokerSettings(url=own_server.url), "test") as bus:
        gates = {"old": asyncio.Event(), "new": asyncio.Event()}
        worker = Worker(bus, unique, slots=8, behave=lambda delivery: gates[delivery.message.request.request_id[:3]].wait())  # type: ignore[arg-type, return-value]
        await worker.put("old1", "old2")
        async with worker.running_consumer() as consumer:
            await until(lambda: worker.running == 2)
            await own_server.restart(empty_store=True)
            await bus.wait_connected()
            await ensure_topology(bus, TopologySettings())
            await worker.put("new1", "new2")
            await until(lambda: worker.running == 4)
            gates["old"].set()
            await until(lambda: consumer.in_hand == 2)
            assert (await consumer_counts(bus))[subjects.prefill(unique)].in_progress == 2
            assert await queued(bus, unique) == 2
            gates["new"].set()
            await until_queued(bus, unique, 0)
        assert [delivery.deliveries for delivery in worker.handled] == [1] * 4
