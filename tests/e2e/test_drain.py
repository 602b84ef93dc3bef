"""Workers and routers that leave on purpose: no client notices."""

import asyncio
from typing import Any

import pytest
from fleet import fleet_of
from operations import Load, all_ready, idle, prompt_of, until, until_held

from jetwake.consumers.timing import DYNAMO_DEFAULT as SLOW
from jetwake.deploy.dead import list_dead
from jetwake.deploy.drain import drain
from jetwake.deploy.nats_server import NatsServer
from jetwake.deploy.status import read_status, waits_for
from jetwake.pipeline.settings import BrokerSettings
from jetwake.schemas.errors import NoWorker


async def test_a_rolling_restart_under_load_is_not_seen_by_any_client(own_server: NatsServer) -> None:
    """Twenty restarts of workers and one of the router, one after the other; some with so little grace that answers go on elsewhere."""
    options: dict[str, Any] = {"timing": SLOW, "slots": 8}
    async with fleet_of(own_server.url, prefill=2, decode=2, **options) as (fleet, client):
        load = Load(client, at_once=12, max_tokens=30)
        async with load.running():
            for grace_s in (0.05, 30.0, 0.05, 30.0, 30.0):  # of those that are started now and stopped in the next round
                for name in ("prefill-1", "decode-1", "prefill-2", "decode-2"):
                    await load.some_more(5)
                    await fleet.stop(name)
                    fleet.start_worker(name.partition("-")[0], name, {"grace_s": grace_s}, **options)
                    await all_ready(fleet, 4)
            await load.some_more(10)
            fleet.start_router("router-2")
            await fleet.stop("router-1")
            await load.some_more(10)
        assert {answer.finish_reason for answer in load.answers} == {"length"}
        assert any(answer.attempts > 1 for answer in load.answers)
        await idle(fleet)
        assert await list_dead(fleet.broker) == []


async def test_what_waits_for_a_draining_worker_goes_to_others_at_once(own_server: NatsServer) -> None:
    async with fleet_of(own_server.url, aggregated=1, timing=SLOW, slots=1) as (fleet, client):
        waiting = [asyncio.create_task(client.generate(prompt_of(number), max_tokens=100, temperature=0.0)) for number in range(12)]
        await until(lambda: fleet.engines["aggregated-1"].stats().running_requests == 1)
        fleet.start_worker("aggregated", "aggregated-2", slots=16)
        await all_ready(fleet, 2)
        heard, drained = await drain(fleet.broker, "aggregated-1", "test", 30)
        assert (heard.role, heard.name) == ("aggregated", "aggregated-1")
        assert drained is not None
        assert drained.in_time
        assert drained.moved_requests > 0
        answers = await asyncio.gather(*waiting)
        assert {answer.decode_worker for answer in answers} == {"aggregated-1", "aggregated-2"}
        await fleet.ended("aggregated-1")


async def test_handoffs_that_nobody_pulls_are_handed_back_when_the_grace_is_over(own_server: NatsServer) -> None:
    """A prefill worker drains while no decode slot is free: its handoffs are prefilled by the other one, and nobody is told of it."""
    options: dict[str, Any] = {"timing": SLOW, "slots": 4}
    async with fleet_of(own_server.url, prefill=1, decode=1, worker={"grace_s": 3.0, "stall_limit_s": 300}, **options) as (fleet, client):
        fleet.engines["decode-1"].stall()
        waiting = [asyncio.create_task(client.generate(prompt_of(number), max_tokens=3, temperature=0.0)) for number in range(10)]
        await until_held(fleet, "prefill-1", 6)
        fleet.start_worker("prefill", "prefill-2", **options)
        await all_ready(fleet, 3)
        stopping = asyncio.create_task(fleet.stop("prefill-1"))
        status = await read_status(fleet.broker)
        [draining] = [worker for worker in status["workers"] if worker["worker"] == "prefill-1"]
        assert draining["state"] == "draining"
        assert "to be pulled" in waits_for(draining)
        await stopping
        del fleet.engines["prefill-1"]
        fleet.engines["decode-1"].go_on()
        answers = await asyncio.gather(*waiting)
        assert "prefill-2" in {answer.prefill_worker for answer in answers}
        assert await list_dead(fleet.broker) == []
        await idle(fleet)


async def test_a_router_can_be_told_to_drain(own_server: NatsServer) -> None:
    async with fleet_of(own_server.url, aggregated=1) as (fleet, client):
        heard, drained = await drain(fleet.broker, "router-1", "test", 30)
        assert (heard.role, drained is not None and drained.in_time) == ("router", True)
        await fleet.ended("router-1")
        waiting = asyncio.create_task(client.generate([1, 2, 3], max_tokens=2))
        fleet.start_router("router-2")
        assert (await waiting).attempts == 1


async def test_draining_somebody_who_is_not_there_is_an_error(own_server: NatsServer) -> None:
    with pytest.raises(NoWorker, match="nobody-1"):
        await drain(BrokerSettings(url=own_server.url), "nobody-1", "", 5)
