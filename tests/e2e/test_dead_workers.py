"""Workers that die: what they had goes on elsewhere. The processes are real ones, killed with SIGKILL."""

import asyncio
import signal
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from fleet import fleet_of

from jetwake.deploy.nats_server import NatsServer
from jetwake.pipeline.connection import Bus
from jetwake.pipeline.registry import Registry
from jetwake.pipeline.settings import BrokerSettings
from jetwake.schemas.workers import WorkerCard


@asynccontextmanager
async def worker_process(
    url: str, role: str, name: str, model: str, log: Path, *options: str
) -> AsyncGenerator[asyncio.subprocess.Process]:
    """One worker as the command runs it."""
    arguments = [role, "--name", name, "--engine", "simulated", "--model", model, "--nats-url", url]
    for option in options:
        arguments += ["--engine-option", option]
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(sys.executable, "-m", "jetwake.deploy.cli", *arguments, stdout=output, stderr=output)
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


@asynccontextmanager
async def registry_of(url: str) -> AsyncGenerator[Registry]:
    async with Bus.connect(BrokerSettings(url=url), "watcher") as bus:
        registry = Registry(bus)
        await registry.start()
        running = asyncio.create_task(registry.run())
        try:
            yield registry
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


SLOW = ("timing=dynamo-default", "slots=1")


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_what_a_killed_worker_had_is_answered_by_others(own_server: NatsServer, tmp_path: Path, role: str) -> None:
    """The doomed worker takes its share of the requests and is killed holding them, queued and running."""
    async with (
        fleet_of(own_server.url, prefill=1, decode=1, slots=2) as (_, client),
        worker_process(own_server.url, role, "doomed", "sim", tmp_path / "log", *SLOW) as doomed,
        registry_of(own_server.url) as registry,
    ):
        await registry.wait_for(lambda workers: "doomed" in workers and all_greeted(workers), 20)
        waiting = [asyncio.create_task(client.generate([n, *range(300)], max_tokens=20, temperature=0.0)) for n in range(40)]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)  # now every worker has work in hand
        doomed.send_signal(signal.SIGKILL)
        async with asyncio.timeout(60):
            answers = await asyncio.gather(*waiting)
        assert len(answers) == 40
        assert all(len(answer.token_ids) == 20 for answer in answers)


def all_greeted(workers: Mapping[str, WorkerCard]) -> bool:
    prefill = {card.lane for card in workers.values() if card.role == "prefill"}
    return all(prefill <= set(card.peers) for card in workers.values() if card.role == "decode")
