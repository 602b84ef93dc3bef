"""A worker whose vLLM engine core is stopped, while the worker itself is well: seen, out of the rotation, and replaced."""

import asyncio
from pathlib import Path

import psutil
import pytest

from jetwake.consumers.engine_vllm.engine import VllmEngine
from jetwake.deploy.app import run_router
from jetwake.deploy.chaos.freezing import freeze
from jetwake.deploy.local import wait_until_served
from jetwake.deploy.nats_server import NatsServer
from jetwake.deploy.role_settings import RouterSettings, WorkerSettings
from jetwake.deploy.worker import run_worker
from jetwake.pipeline.connection import Bus
from jetwake.pipeline.registry import Registry
from jetwake.pipeline.settings import BrokerSettings, TopologySettings
from jetwake.producers.client import Client
from jetwake.schemas.errors import EngineDead

from .vllm_engines import settings_for, tiny_model  # noqa: F401  (a fixture)

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

STALL_LIMIT_S = 5.0


async def test_a_stopped_engine_core_turns_its_worker_red_and_its_work_goes_on(own_server: NatsServer, tiny_model: Path) -> None:  # noqa: F811
    broker, topology, stopping = BrokerSettings(url=own_server.url), TopologySettings(), asyncio.Event()

    def worker(engine: VllmEngine) -> asyncio.Task[None]:
        settings = WorkerSettings(name="only", role="aggregated", stall_limit_s=STALL_LIMIT_S)
        return asyncio.create_task(run_worker(settings, engine, broker, topology, stopping))

    router = asyncio.create_task(run_router(RouterSettings(), broker, topology, stopping))
    engine = VllmEngine(settings_for(tiny_model))
    first = worker(engine)
    await wait_until_served(broker, "tiny")
    async with Client.connect(broker) as client, Bus.connect(broker, "watcher") as bus:
        registry = Registry(bus)
        await registry.start()
        states: list[str] = []
        registry.on_change(lambda: states.append(registry.workers["only"].state if "only" in registry.workers else "gone"))
        submitted = await client.submit([300, 301, 302], model="tiny", max_tokens=2000, temperature=0.0, ignore_eos=True)
        pieces = aiter(submitted)
        await anext(pieces)

        family = engine.processes.alive()
        [core] = [process for process in family if "EngineCore" in process.name()]
        await freeze(core.pid)
        with pytest.raises(EngineDead, match=r"no progress|did not answer"):
            async with asyncio.timeout(STALL_LIMIT_S + 30):
                await first
        assert "stalled" in states
        assert not [process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]

        second = worker(VllmEngine(settings_for(tiny_model)))
        answer = await submitted.answer()
        assert (len(answer.token_ids), answer.finish_reason, answer.attempts) == (2000, "length", 2)
        stopping.set()
        await asyncio.gather(second, router)
