"""A system that is started again on the same store, and clients that are gone: nobody computes for nobody."""

import asyncio

import pytest
from fleet import Fleet, fleet_of
from operations import idle, patient, prompt_of, until

from jetwake.consumers.timing import DYNAMO_DEFAULT as SLOW
from jetwake.deploy.nats_server import NatsServer
from jetwake.pipeline import readers
from jetwake.pipeline.clock import WallClock
from jetwake.pipeline.connection import Bus
from jetwake.pipeline.replies import ReplyInbox
from jetwake.producers.client import Client, Submitted


async def test_requests_of_clients_that_are_gone_are_not_run_after_a_restart_past_their_deadline(own_server: NatsServer) -> None:
    """Fifty wait in all queues when everything is stopped."""
    async with fleet_of(own_server.url, prefill=1, decode=1, slots=1) as (fleet, client):
        fleet.engines["prefill-1"].stall()
        submitted: list[Submitted] = [await client.submit(prompt_of(number), max_tokens=5, timeout_s=3.0) for number in range(50)]
        name = client.name
        await fleet.kill_all()
        fleet.engines.clear()
        await until(lambda: all(client.now_ns() > each.request.deadline_ns for each in submitted))
    await own_server.restart()
    async with fleet_of(own_server.url, prefill=1, decode=1) as (fleet, client):
        async with asyncio.timeout(30), Bus.connect(patient(fleet.broker), "reader") as bus:
            inbox = ReplyInbox(bus, name, WallClock())
            for each in submitted:
                while (end := await inbox.lookup("sim", name, each.request_id)) is None:
                    await asyncio.sleep(0.05)
                assert end.type == "expired"
        await idle(fleet)
        assert fleet.engines["prefill-1"].stats().counters["prefilled_requests"] == 1  # the one that says that all is ready


async def test_requests_of_a_client_that_died_are_cancelled_where_they_ask_for_it(
    own_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "ASK_EVERY_S", 0.2)
    monkeypatch.setattr(readers, "GONE_AFTER_S", 0.5)
    async with fleet_of(own_server.url, prefill=1, decode=1, timing=SLOW) as (fleet, client):
        async with Client.connect(fleet.broker) as mortal:
            mortal.default_model = "sim"
            unread = await mortal.submit(prompt_of(1), max_tokens=30_000, cancel_when_unread=True)
            kept = await mortal.submit(prompt_of(2), max_tokens=30_000)
            await until(lambda: fleet.engines["decode-1"].stats().running_requests == 2)
        async with asyncio.timeout(30), Bus.connect(patient(fleet.broker), "reader") as bus:
            inbox = ReplyInbox(bus, "reader", WallClock())
            while (end := await inbox.lookup("sim", mortal.name, unread.request_id)) is None:
                await asyncio.sleep(0.05)
            assert end.type == "cancelled"
            await until(lambda: fleet.engines["decode-1"].stats().running_requests == 1)
            assert await inbox.lookup("sim", mortal.name, kept.request_id) is None
        await client.cancel(kept.request_id)
        await idle(fleet)


async def test_a_cancel_is_known_to_processes_that_start_after_it(own_server: NatsServer) -> None:
    async with fleet_of(own_server.url, aggregated=1) as (fleet, client):
        await fleet.stop("router-1")
        submitted = await client.submit(prompt_of(1), max_tokens=5)
        await submitted.cancel()
        before = drawn(fleet)
        fleet.start_router("router-2")
        assert (await client.generate(prompt_of(2), max_tokens=5)).finish_reason == "length"
        async with asyncio.timeout(20), Bus.connect(patient(fleet.broker), "reader") as bus:
            while (end := await ReplyInbox(bus, "reader", WallClock()).lookup("sim", client.name, submitted.request_id)) is None:
                await asyncio.sleep(0.05)
        assert end.type == "cancelled"
        assert drawn(fleet) - before == 5


def drawn(fleet: Fleet) -> int:
    return fleet.engines["aggregated-1"].stats().counters["drawn_tokens"]
