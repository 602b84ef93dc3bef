"""Storing: sizes, refusals, compare-and-set, and the same message once over lost answers and broker restarts."""

import asyncio

import pytest

from jetwake.deploy.nats_server import NatsServer
from jetwake.pipeline.connection import Bus, encoded_headers_bytes
from jetwake.pipeline.jetstream import api
from jetwake.pipeline.publish import Publisher, Stored
from jetwake.pipeline.settings import BrokerSettings, TopologySettings
from jetwake.pipeline.topology import ensure_topology, stream_counts, subject_counts
from jetwake.schemas import subjects
from jetwake.schemas.errors import BrokerUnavailable, BusRejected, PayloadTooLarge, SequenceConflict, StreamFull, StreamMissing
from jetwake.schemas.replies import CancelRequest
from jetwake.schemas.streams import DEAD, PREFILL


async def test_stored_once_under_its_id(publisher: Publisher, unique: str) -> None:
    subject = subjects.dead(unique)
    first = await publisher.store_bytes(subject, b"x", message_id=unique)
    again = await publisher.store_bytes(subject, b"x", message_id=unique)
    assert (first.duplicate, again.duplicate, again.sequence) == (False, True, first.sequence)


async def test_first_only_loses_against_whoever_was_first(publisher: Publisher, unique: str) -> None:
    subject = subjects.result("tiny", unique, "r1")
    await publisher.store_bytes(subject, b"a", message_id=f"{unique}:a", first_only=True)
    with pytest.raises(SequenceConflict):
        await publisher.store_bytes(subject, b"b", message_id=f"{unique}:b", first_only=True)


@pytest.mark.parametrize("message_id", ["a", "b"])
async def test_own_earlier_send_is_told_from_somebody_elses(bus: Bus, publisher: Publisher, unique: str, message_id: str) -> None:
    """What a resend meets whose first answer was lost. The loss itself is made by the tests that kill the broker."""
    subject = subjects.result("tiny", unique, "r1")
    stored = await publisher.store_bytes(subject, b"a", message_id=f"{unique}:a", first_only=True)
    headers = {subjects.MESSAGE_ID_HEADER: f"{unique}:{message_id}", subjects.EXPECTED_LAST_SUBJECT_SEQUENCE_HEADER: "0"}
    answer = await bus.request(subject, b"a", headers)
    if message_id == "a":
        assert await publisher._judge(answer, subject, headers, unsure=True) == Stored(stored.sequence, duplicate=True, resent=True)
    else:
        with pytest.raises(SequenceConflict):
            await publisher._judge(answer, subject, headers, unsure=True)


async def test_payload_and_headers_are_measured_together(bus: Bus, publisher: Publisher, unique: str) -> None:
    headers = {subjects.MESSAGE_ID_HEADER: unique}
    room = bus.max_payload_bytes - encoded_headers_bytes(headers)
    with pytest.raises(PayloadTooLarge, match=str(bus.max_payload_bytes)):
        await publisher.store_bytes(subjects.dead(unique), bytes(room + 1), message_id=unique)
    stored = await publisher.store_bytes(subjects.dead(unique), bytes(room), message_id=unique)
    assert stored.sequence > 0
    assert bus.connected


async def test_a_full_queue_refuses_and_does_not_burn_the_id(own_server: NatsServer, unique: str) -> None:
    async with Bus.connect(BrokerSettings(url=own_server.url), "test") as bus:
        await ensure_topology(bus, TopologySettings(max_jobs_per_worker=2))
        publisher, subject = Publisher(bus), subjects.prefill(unique)
        for n in range(2):
            await publisher.store_bytes(subject, b"x", message_id=f"{unique}:{n}")
        with pytest.raises(StreamFull):
            await publisher.store_bytes(subject, b"x", message_id=f"{unique}:2")
        await api(bus, f"STREAM.PURGE.{PREFILL.name}", {"filter": subject})
        assert not (await publisher.store_bytes(subject, b"x", message_id=f"{unique}:2")).duplicate


async def test_a_subject_without_a_stream_is_said_to_be_missing(nats_server: NatsServer, unique: str) -> None:
    settings = BrokerSettings(url=nats_server.url, missing_grace_s=0.1)
    async with Bus.connect(settings, "test") as bus:
        with pytest.raises(StreamMissing):
            await Publisher(bus).store_bytes(f"nowhere.{unique}", b"x", message_id=unique)


async def test_no_broker_until_the_deadline_is_said_to_be_unavailable(own_server: NatsServer, unique: str) -> None:
    settings = BrokerSettings(url=own_server.url, request_timeout_s=0.2, publish_deadline_s=0.5)
    async with Bus.connect(settings, "test") as bus:
        await own_server.kill()
        with pytest.raises(BrokerUnavailable):
            await Publisher(bus).store_bytes(subjects.dead("x"), b"x", message_id=unique)


async def test_every_message_is_stored_once_over_a_broker_kill(own_server: NatsServer) -> None:
    async with Bus.connect(BrokerSettings(url=own_server.url), "test") as bus:
        publisher = Publisher(bus)
        storing = [asyncio.create_task(publisher.store_bytes(subjects.dead("x"), b"x", message_id=f"m{n}")) for n in range(500)]
        await storing[50]
        await own_server.kill()
        await own_server.start()
        stored = await asyncio.gather(*storing)
        assert len({each.sequence for each in stored}) == 500
        assert (await stream_counts(bus))[DEAD.name].messages == 500


async def test_a_resend_of_a_first_only_message_wins_over_a_broker_kill(own_server: NatsServer) -> None:
    """The broker tests the expected sequence before the id, so a resend meets its own earlier copy."""
    async with Bus.connect(BrokerSettings(url=own_server.url), "test") as bus:
        publisher = Publisher(bus)
        names = [subjects.result("tiny", "gw", f"r{n}") for n in range(500)]
        storing = [asyncio.create_task(publisher.store_bytes(name, b"x", message_id=name, first_only=True)) for name in names]
        await storing[50]
        await own_server.kill()
        await own_server.start()
        await asyncio.gather(*storing)
        assert len(await subject_counts(bus, "JW_RESULTS")) == 500


async def test_a_ttl_of_whole_seconds_is_kept(bus: Bus, publisher: Publisher, unique: str) -> None:
    with pytest.raises(BusRejected, match=r"(?i)ttl"):
        await publisher.store_bytes(subjects.dead(unique), b"x", ttl_s=1)
    assert (await publisher.store_bytes(f"$KV.jw_workers.{unique}", b"x", ttl_s=1)).sequence > 0


async def test_send_reaches_live_listeners(bus: Bus, publisher: Publisher, unique: str) -> None:
    heard: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    await bus.subscribe(subjects.cancel(unique), lambda message: heard.set_result(message.data))
    await publisher.send(subjects.cancel(unique), CancelRequest(request_id=unique))
    async with asyncio.timeout(5):
        assert unique.encode() in await heard
