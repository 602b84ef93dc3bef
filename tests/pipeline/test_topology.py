"""Declared state and the broker's: made once, compared in words, repaired."""

import asyncio
from dataclasses import replace

import pytest
from pydantic import ValidationError

from jetwake.deploy.nats_server import NatsServer
from jetwake.pipeline.connection import Bus, RawMessage
from jetwake.pipeline.jetstream import api, pull_subject
from jetwake.pipeline.publish import Publisher
from jetwake.pipeline.settings import BrokerSettings, TopologySettings
from jetwake.pipeline.topology import (
    QueueCount,
    consumer_counts,
    delete_consumer,
    drift,
    ensure_consumer,
    ensure_topology,
    restore_missing,
    stream_counts,
    subject_counts,
)
from jetwake.schemas import subjects
from jetwake.schemas.errors import StreamMissing
from jetwake.schemas.streams import BUCKETS, DEAD, HANDOFF, OBJECTS, PREFILL, STREAMS, ConsumerSpec, prefill_consumer


async def test_the_second_time_changes_nothing(bus: Bus) -> None:
    assert await ensure_topology(bus, TopologySettings()) == []
    assert await drift(bus, TopologySettings()) == []


async def test_drift_says_what_differs_and_ensure_repairs_it(own_server: NatsServer) -> None:
    async with Bus.connect(BrokerSettings(url=own_server.url), "test") as bus:
        await api(bus, f"STREAM.DELETE.{HANDOFF.name}")
        await delete_consumer(bus, "JW_REQUESTS", "router-batch")
        wanted = TopologySettings(max_requests=7)
        expected = [
            "stream JW_REQUESTS: max_msgs is 20000, declared 7",
            "stream JW_HANDOFF: missing",
            "consumer JW_REQUESTS/router-batch: missing",
        ]
        assert await drift(bus, wanted) == expected
        assert await ensure_topology(bus, wanted) == expected
        assert await drift(bus, wanted) == []


async def test_a_stream_that_is_made_anew_gives_no_sequence_again(own_server: NatsServer) -> None:
    """Whether it was deleted or lost with the store, and whichever of several processes makes it."""

    async def next_sequences(bus: Bus) -> dict[str, int]:
        infos = {name: await api(bus, f"STREAM.INFO.{name}") for name in await stream_counts(bus) if name != DEAD.name}
        return {name: info["state"]["last_seq"] + 1 for name, info in infos.items()}

    async with Bus.connect(BrokerSettings(url=own_server.url), "test") as bus:
        before = await next_sequences(bus)
        assert len(before) == len(STREAMS) + len(BUCKETS) + len(OBJECTS) - 1
        used = {name: sequence + 1000 for name, sequence in before.items()}  # what each may have given by now
        for name in before:
            await api(bus, f"STREAM.DELETE.{name}")
        made = await asyncio.gather(*(restore_missing(bus, TopologySettings()) for _ in range(5)))
        assert sorted(line for lines in made for line in lines) == sorted(f"stream {name}" for name in before)
        anew = await next_sequences(bus)
        assert all(anew[name] > used[name] for name in before)
        await own_server.restart(empty_store=True)
        await bus.wait_connected()
        await ensure_topology(bus, TopologySettings())
        again = await next_sequences(bus)
        assert all(again[name] > anew[name] + 1000 for name in before)
        await own_server.restart()
        await bus.wait_connected()
        await ensure_topology(bus, TopologySettings())
        kept = await next_sequences(bus)
        assert all(kept[spec.name] == again[spec.name] for spec in STREAMS if spec.name in kept and spec.storage == "file")


async def test_a_consumer_is_declared_counted_and_deleted(bus: Bus, publisher: Publisher, unique: str) -> None:
    subject = subjects.prefill(unique)
    await publisher.store_bytes(subject, b"x", message_id=unique)
    await ensure_consumer(bus, prefill_consumer(unique))
    await ensure_consumer(bus, prefill_consumer(unique))
    assert (await consumer_counts(bus))[subject] == QueueCount(pending=1, in_progress=0)
    assert await delete_consumer(bus, PREFILL.name, unique)
    assert not await delete_consumer(bus, PREFILL.name, unique)
    assert (await subject_counts(bus, PREFILL.name))[subject] == 1


async def test_a_consumer_of_an_earlier_version_is_made_anew_and_loses_nothing(bus: Bus, publisher: Publisher, unique: str) -> None:
    subject, spec = subjects.prefill(unique), prefill_consumer(unique)
    await ensure_consumer(bus, replace(spec, max_waiting=64))
    for data in (b"held", b"waits"):
        await publisher.store_bytes(subject, data, message_id=unique + data.decode())
    taken, inbox = asyncio.Queue[RawMessage](), bus.new_inbox()
    await bus.subscribe(inbox, taken.put_nowait)
    await bus.publish_with_reply(pull_subject(PREFILL.name, unique), b'{"batch": 1}', inbox)
    assert ((await taken.get()).data, (await consumer_counts(bus))[subject]) == (b"held", QueueCount(pending=1, in_progress=1, delivered=1))
    await ensure_consumer(bus, spec)
    assert (await consumer_counts(bus))[subject] == QueueCount(pending=2, in_progress=0)
    await bus.publish_with_reply(pull_subject(PREFILL.name, unique), b'{"batch": 1}', inbox)
    assert (await taken.get()).data == b"held"


async def test_every_stream_is_counted(bus: Bus) -> None:
    assert {spec.name for spec in STREAMS} <= set(await stream_counts(bus))


async def test_a_consumer_needs_its_stream(bus: Bus, unique: str) -> None:
    with pytest.raises(StreamMissing):
        await ensure_consumer(bus, ConsumerSpec("JW_NOWHERE", unique, "x"))


def test_an_unknown_setting_is_an_error() -> None:
    with pytest.raises(ValidationError):
        TopologySettings.model_validate({"max_request": 1})


def test_settings_reach_the_streams() -> None:
    named = {spec.name: spec for spec in TopologySettings(max_jobs_per_worker=3, replicas=3).streams()}
    assert named["JW_PREFILL"].max_messages_per_subject == 3
    assert {spec.replicas for spec in named.values()} == {3}
