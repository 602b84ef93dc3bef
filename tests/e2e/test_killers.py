"""Requests that kill whoever runs them, and what an operator can do about those that could not be done."""

import asyncio
import json
import os
import subprocess
import sys

import pytest
from fleet import Fleet, fleet_of
from operations import all_ready, idle, prompt_of

from jetwake.deploy.dead import list_dead, retry_dead
from jetwake.deploy.nats_server import NatsServer
from jetwake.pipeline.connection import Bus
from jetwake.pipeline.publish import Publisher
from jetwake.producers.client import Client
from jetwake.schemas import subjects
from jetwake.schemas.errors import EngineDead, RequestFailed

KILLER = 249


async def kill_three(fleet: Fleet, client: Client, role: str) -> str:
    """Sends one that kills three workers, and waits until they have ended. Its id."""
    submitted = await client.submit([KILLER, *prompt_of(1)], max_tokens=5, temperature=0.0)
    with pytest.raises(RequestFailed, match="engine_dead"):
        await submitted.answer()
    dead = [name for name, engine in fleet.engines.items() if name.startswith(role) and not await is_alive(engine)]
    assert len(dead) == 3
    for name in dead:
        with pytest.raises(EngineDead):
            await fleet.ended(name)
        fleet.forget(name)
    return submitted.request_id


async def is_alive(engine: object) -> bool:
    try:
        await engine.ping(1.0)  # type: ignore[attr-defined]
    except EngineDead:
        return False
    return True


@pytest.mark.parametrize("role", ["aggregated", "prefill"])
async def test_a_killer_meets_three_workers_and_ends_as_a_dead_letter(own_server: NatsServer, role: str) -> None:
    roles = {"aggregated": 4} if role == "aggregated" else {"prefill": 4, "decode": 1}
    async with fleet_of(own_server.url, **roles, dies_on_token=KILLER) as (fleet, client):
        await all_ready(fleet, sum(roles.values()))
        innocent = [asyncio.create_task(client.generate(prompt_of(number), max_tokens=20, temperature=0.0)) for number in range(20)]
        request_id = await kill_three(fleet, client, role)
        answers = await asyncio.gather(*innocent)
        assert all(len(answer.token_ids) == 20 for answer in answers)
        [kept] = await list_dead(fleet.broker)
        assert kept.request is not None
        assert (kept.letter.code, kept.letter.request_id, kept.letter.attempts) == ("engine_dead", request_id, 3)
        assert len(set(kept.request.failed_workers)) == 3
        assert (await client.generate(prompt_of(50), max_tokens=3)).finish_reason == "length"
        await idle(fleet)


async def test_a_dead_letter_is_sent_again_as_a_request_of_its_own(own_server: NatsServer) -> None:
    async with fleet_of(own_server.url, aggregated=4, dies_on_token=KILLER) as (fleet, client):
        await all_ready(fleet, 4)
        request_id = await kill_three(fleet, client, "aggregated")
        [left] = list(fleet.engines)
        await fleet.stop(left)
        fleet.forget(left)
        fleet.start_worker("aggregated", "repaired")
        await all_ready(fleet, 1)
        [kept] = await list_dead(fleet.broker)
        [outcome] = await retry_dead(fleet.broker, [kept.number], wait=True)
        assert outcome["finish_reason"] == "length"
        assert outcome["request_id"] == f"{request_id}-r{kept.number}"
        assert await list_dead(fleet.broker) == []
        [gone] = await retry_dead(fleet.broker, [kept.number], wait=False)
        assert gone["error"] == "invalid_request"


def jetwake(url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jetwake.deploy.cli", *arguments, "--nats-url", url]
    environment = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


async def test_a_letter_without_a_request_is_shown_and_cannot_be_retried(own_server: NatsServer) -> None:
    async with fleet_of(own_server.url, aggregated=1) as (fleet, _), Bus.connect(fleet.broker, "caller") as bus:
        await Publisher(bus).store_bytes(subjects.requests("sim", "interactive"), b"\xc1nonsense", message_id="nonsense")
        async with asyncio.timeout(20):
            while not await list_dead(fleet.broker):
                await asyncio.sleep(0.05)
        listed = await asyncio.to_thread(jetwake, own_server.url, "dead", "list", "--json")
        [facts] = json.loads(listed.stdout)
        assert (facts["stage"], facts["code"], facts["can_retry"]) == ("routing", "undecodable", False)
        number = str(facts["letter"])
        shown = await asyncio.to_thread(jetwake, own_server.url, "dead", "show", number)
        assert "nonsense" in shown.stdout
        retried = await asyncio.to_thread(jetwake, own_server.url, "dead", "retry", number)
        assert (retried.returncode, "holds no request" in retried.stdout) == (1, True)
        assert "undecodable" in (await asyncio.to_thread(jetwake, own_server.url, "dead", "list")).stdout
