"""Engines that stand still and workers that are stopped: noticed, out of the rotation, replaced; and what they do when they go on."""

import asyncio
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fleet import fleet_of
from operations import all_ready, idle, prompt_of, until
from test_dead_workers import SLOW, all_greeted, registry_of, worker_process

from jetwake.consumers.timing import DYNAMO_DEFAULT
from jetwake.deploy import worker
from jetwake.deploy.chaos.freezing import freeze, thaw
from jetwake.deploy.nats_server import NatsServer
from jetwake.schemas.errors import EngineDead, RequestFailed

STALLER = 249


@pytest.mark.parametrize("role", ["aggregated", "prefill", "decode"])
async def test_an_engine_that_stands_still_with_work_is_out_and_its_work_goes_on_elsewhere(own_server: NatsServer, role: str) -> None:
    others = {} if role == "aggregated" else {"prefill": 1, "decode": 1}
    fine: dict[str, Any] = {"timing": DYNAMO_DEFAULT}
    async with (
        fleet_of(own_server.url, aggregated=int(not others), **others, **fine) as (fleet, client),
        registry_of(own_server.url) as registry,
    ):
        states: list[str] = []
        registry.on_change(lambda: states.append(registry.workers["stuck"].state if "stuck" in registry.workers else "gone"))
        fleet.start_worker(role, "stuck", {"stall_limit_s": 1.0}, **fine)
        await all_ready(fleet, 3 if others else 2)
        waiting = [asyncio.create_task(client.generate(prompt_of(number), max_tokens=40, temperature=0.0)) for number in range(16)]
        await until(lambda: fleet.engines["stuck"].stats().running_requests > 1)
        fleet.engines["stuck"].stall()
        answers = await asyncio.gather(*waiting)
        assert all(len(answer.token_ids) == 40 for answer in answers)
        with pytest.raises(EngineDead, match=r"no progress|did not answer"):
            await fleet.ended("stuck")
        fleet.forget("stuck")
        await until(lambda: states[-1] == "gone")
        assert "stalled" in states
        await idle(fleet)


async def test_an_idle_engine_that_stands_still_is_found_by_its_silence(own_server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "PING_EVERY_S", 0.5)
    async with fleet_of(own_server.url, aggregated=1) as (fleet, client):
        fleet.start_worker("aggregated", "stuck", {"stall_limit_s": 0.2})
        await all_ready(fleet, 2)
        fleet.engines["stuck"].stall()
        with pytest.raises(EngineDead, match="did not answer"):
            await fleet.ended("stuck")
        fleet.forget("stuck")
        assert (await client.generate(prompt_of(1), max_tokens=3)).decode_worker == "aggregated-1"


@pytest.mark.parametrize("role", ["prefill", "decode", "aggregated"])
async def test_a_worker_that_was_taken_for_dead_and_goes_on_does_no_harm(own_server: NatsServer, tmp_path: Path, role: str) -> None:
    """Stopped with work queued and running. All of that ends elsewhere. When it goes on, it is of use again, and nothing ends twice."""
    others = {"aggregated": 1} if role == "aggregated" else {"prefill": 1, "decode": 1}
    async with (
        fleet_of(own_server.url, **others, slots=2) as (fleet, client),
        worker_process(own_server.url, role, "frozen", "sim", tmp_path / "log", *SLOW) as frozen,
        registry_of(own_server.url) as registry,
    ):
        await registry.wait_for(lambda workers: "frozen" in workers and all_greeted(workers), 90)
        first = registry.workers["frozen"].incarnation
        waiting = [asyncio.create_task(client.generate(prompt_of(number, 300), max_tokens=20, temperature=0.0)) for number in range(40)]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)  # now every worker has work in hand
        await freeze(frozen.pid)
        answers = await asyncio.gather(*waiting)
        assert all(len(answer.token_ids) == 20 for answer in answers)
        await registry.wait_for(lambda workers: "frozen" not in workers, 90)

        thaw(frozen.pid)
        await registry.wait_for(lambda workers: "frozen" in workers and all_greeted(workers), 90)
        if role != "decode":  # its queue was taken away
            await registry.wait_for(lambda workers: "frozen" in workers and workers["frozen"].incarnation != first, 90)
            await registry.wait_for(all_greeted, 90)
        for name in others:
            if name == role:
                await fleet.stop(f"{name}-1")
                fleet.forget(f"{name}-1")
        answer = await client.generate(prompt_of(77, 300), max_tokens=5, temperature=0.0)
        assert "frozen" in (answer.prefill_worker, answer.decode_worker)
        assert answer.attempts == 1
        frozen.send_signal(signal.SIGTERM)
        assert await frozen.wait() == 0
        await idle(fleet)


async def test_a_decode_worker_whose_pulls_all_fail_is_out(own_server: NatsServer) -> None:
    """Its engine lives and answers; only its transfers do not work."""
    async with fleet_of(own_server.url, prefill=2, decode=1) as (fleet, client):
        fleet.start_worker("decode", "broken", pulls_fail=True)
        ended = asyncio.create_task(fleet.ended("broken"))
        number = 0
        while not ended.done():
            number += 1
            with suppress(RequestFailed):  # each of its pulls costs a request one of its three faults
                await client.generate(prompt_of(number), max_tokens=4)
        with pytest.raises(EngineDead):
            await ended
        fleet.forget("broken")
        for number in range(1000, 1020):
            assert (await client.generate(prompt_of(number), max_tokens=4)).attempts == 1
