"""A whole Jetwake in this process: real broker, real NIXL between simulated engines, the same composition as the commands run."""

import asyncio
import importlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from jetwake.consumers.engine_simulated import SimulatedEngine, SimulatedSettings
from jetwake.deploy.app import run_router
from jetwake.deploy.local import wait_until_served
from jetwake.deploy.nats_declare import declare_all
from jetwake.deploy.nats_users import User, broker_settings
from jetwake.deploy.role_settings import RouterSettings, WorkerSettings
from jetwake.deploy.worker import run_worker
from jetwake.pipeline.connection import Bus
from jetwake.pipeline.permissions import Role, inbox_prefix
from jetwake.pipeline.settings import BrokerSettings, TopologySettings
from jetwake.producers.client import Client

importlib.import_module("nixl")  # seconds on a busy machine, in which nothing else in this process would get a turn

MODEL = "sim"


class Fleet:
    users: Path | None = None
    """Where brokers know users (`pytest tests/e2e --secured`), their files: then every part connects as its own."""

    def __init__(self, broker: BrokerSettings, limits: TopologySettings | None = None) -> None:
        # Tests do as operators and clients do, and the parts of a fleet may answer those alone.
        self.broker = broker if self.users is None else broker.model_copy(update={"inbox_prefix": inbox_prefix("operator")})
        self.limits = limits or TopologySettings()
        self.engines: dict[str, SimulatedEngine] = {}
        self._stops: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start_router(
        self,
        name: str = "router-1",
        policy: str = "least_loaded",
        url: str | None = None,
        broker: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """`url`: its own way to the broker. `broker`: other settings of that."""
        stop = self._stops[name] = asyncio.Event()
        settings = RouterSettings(name=name, policy=policy, **options)
        self._tasks[name] = asyncio.create_task(run_router(settings, self._broker("router", url, broker), self.limits, stop))

    def start_worker(
        self,
        role: Any,
        name: str,
        worker_options: dict[str, Any] | None = None,
        url: str | None = None,
        broker: dict[str, Any] | None = None,
        **engine_options: Any,
    ) -> None:
        """As `start_router`."""
        stop = self._stops[name] = asyncio.Event()
        engine = self.engines[name] = SimulatedEngine(SimulatedSettings(**{"model": MODEL, **engine_options}))
        settings = WorkerSettings(name=name, role=role, **(worker_options or {}))
        self._tasks[name] = asyncio.create_task(run_worker(settings, engine, self._broker(role, url, broker), self.limits, stop))

    def _broker(self, role: Role, url: str | None, changes: dict[str, Any] | None) -> BrokerSettings:
        if self.users is not None:
            settings = broker_settings(self.users, User(role), url or self.broker.url)
        else:
            settings = self.broker if url is None else BrokerSettings(url=url)
        return settings.model_copy(update=changes)

    async def stop(self, name: str) -> None:
        """Drain it and wait for its end. Raises what ended it otherwise."""
        self._stops.pop(name).set()
        await self._tasks.pop(name)

    async def ended(self, name: str) -> None:
        """Waits for the end of one that ends by itself. Raises what ended it."""
        self._stops.pop(name)
        await self._tasks.pop(name)

    def forget(self, name: str) -> None:
        """The engine of one that has ended."""
        del self.engines[name]

    async def kill(self, name: str) -> None:
        """End it without a drain, as near to a crash as one process allows."""
        self._stops.pop(name)
        task = self._tasks.pop(name)
        task.cancel()
        [outcome] = await asyncio.gather(task, return_exceptions=True)
        if isinstance(outcome, Exception):
            raise outcome

    async def stop_all(self) -> None:
        for name in [*reversed(self._tasks)]:
            await self.stop(name)

    async def kill_all(self) -> None:
        """End all without a drain. What had ended some of them before is told by `check`, which a test that goes well comes by."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        self._stops.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def names(self) -> set[str]:
        """Of what runs."""
        return set(self._tasks)

    def check(self) -> None:
        """Raises what ended a part of the fleet that should still run."""
        for task in self._tasks.values():
            if task.done():
                task.result()


@asynccontextmanager
async def fleet_of(
    url: str,
    prefill: int = 0,
    decode: int = 0,
    aggregated: int = 0,
    policy: str = "least_loaded",
    router: dict[str, Any] | None = None,
    worker: dict[str, Any] | None = None,
    limits: TopologySettings | None = None,
    **engine_options: Any,
) -> AsyncGenerator[tuple[Fleet, Client]]:
    """Yields when a request was served."""
    model = engine_options.get("model", MODEL)
    fleet = Fleet(BrokerSettings(url=url), limits)
    if fleet.users is not None:
        async with Bus.connect(fleet.broker, "admin") as bus:
            await declare_all(bus, fleet.limits, [])
    fleet.start_router(policy=policy, **(router or {}))
    for role, count in (("prefill", prefill), ("decode", decode), ("aggregated", aggregated)):
        for number in range(1, count + 1):
            fleet.start_worker(role, f"{role}-{number}", worker, **engine_options)
    try:
        async with asyncio.timeout(60):
            await wait_until_served(fleet.broker, model)
        async with Client.connect(fleet.broker) as client:
            client.default_model = model
            yield fleet, client
        fleet.check()
        await fleet.stop_all()
    finally:
        await fleet.kill_all()
