"""A whole system behind three servers that let in nobody but users, over TLS: every part a process with its own credentials."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jetwake.consumers.simulated_settings import SimulatedSettings
from jetwake.deploy.demo_model import fetch
from jetwake.deploy.local import wait_until_served
from jetwake.deploy.nats_cluster import NatsCluster, wait_until_agreed
from jetwake.deploy.nats_declare import declare_all
from jetwake.deploy.nats_folder import tls_of
from jetwake.deploy.nats_users import ACCOUNTS_FILE, User
from jetwake.pipeline.connection import Bus
from jetwake.pipeline.settings import TopologySettings

from .conftest import MODEL, Secured, folder_of_users
from .processes import Processes, processes_of


@dataclass
class System:
    """`gateway`: its URL; `admin` that of its other port."""

    secured: Secured
    processes: Processes
    gateway: str
    admin: str
    engine: SimulatedSettings

    async def start_worker(self, role: Any, number: int) -> None:
        own = {"tokenizer", "vocabulary_size", "num_blocks"}
        options = [f"{key}={value}" for key, value in self.engine.model_dump(include=own).items()]
        await self.processes.start_worker(role, number, MODEL, "timing=dynamo-default", *options)


@asynccontextmanager
async def running(folder: Path) -> AsyncGenerator[System]:
    """A gateway, two routers, two prefill and two decode workers. Yields when a request was served."""
    tokenizer = await asyncio.to_thread(fetch, "tiny")
    engine = SimulatedSettings(model=MODEL, tokenizer=str(tokenizer), vocabulary_size=2048, num_blocks=1024)
    folder_of_users(folder)
    accounts = (folder / ACCOUNTS_FILE).read_text()
    async with NatsCluster(folder / "brokers", 3, sync_always=False, tls=tls_of(folder, folder), extra_config=accounts) as cluster:
        secured = Secured(folder, cluster.url)
        await wait_until_agreed(secured.settings("admin"))
        async with Bus.connect(secured.settings("admin"), "admin") as bus:
            await declare_all(bus, TopologySettings(replicas=3), [MODEL])
        async with processes_of(folder, cluster.url, folder / "logs") as processes:
            system = System(secured, processes, "", "", engine)
            for number in (1, 2):
                await processes.start(("router", ""), f"router-{number}", "router", "--name", f"router-{number}")
                for role in ("prefill", "decode"):
                    await system.start_worker(role, number)
            page = ("--dashboard-nkey-file", str(User("observer").file(folder, "nk")))
            system.gateway, system.admin = await processes.start_gateway("gateway-1", MODEL, *page)
            async with asyncio.timeout(60):
                await wait_until_served(secured.settings("client", "alice"), MODEL)
            yield system
            processes.check()
