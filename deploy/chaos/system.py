"""The live system of a chaos run: a broker, and every process and client on a link of its own that faults can be done to."""

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from ...pipeline.settings import BrokerSettings
from ...schemas.errors import JetwakeError
from ..app import first_of
from ..local import LocalSystem, children_of, local_system, wait_until_served
from ..nats_cluster import NatsCluster, wait_until_agreed
from ..shared_cores import share_cores
from ..supervisor import Child, Supervisor
from .links import Links
from .plan import Targets
from .users import OpenBroker, SecuredBroker, role_of

RUN_VARIABLE = "_JETWAKE_CHAOS_RUN"
"""In the environment of every process of a run, and of theirs: that finds what outlives it."""
LONGEST_PAUSE_S = 4.0
MOST_REPLICAS = 3


@dataclass(frozen=True)
class Shape:
    """`engine_options` go to every worker. `secured`: the broker lets in its users alone, each with the permissions of its role, over TLS."""

    engine: str
    model: str
    prefill: int
    decode: int
    aggregated: int
    routers: int
    clients: int
    engine_options: Sequence[str]
    policy: str = "kv_aware"
    grace_s: float = 40.0
    servers: int = 1
    secured: bool = False

    def targets(self) -> Targets:
        counts = (("prefill", self.prefill), ("decode", self.decode), ("aggregated", self.aggregated))
        return Targets(
            workers=[f"{role}-{number}" for role, count in counts for number in range(1, count + 1)],
            routers=[f"router-{number}" for number in range(1, self.routers + 1)],
            clients=[f"client-{number}" for number in range(1, self.clients + 1)],
        )

    def local(self, report: Callable[[str], None]) -> LocalSystem:
        """Raises SetupError for what can serve nothing."""
        counts = (self.prefill, self.decode, self.aggregated)
        limits = [f"replicas={self.replicas}"]
        return local_system(self.engine, self.model, "", self.engine_options, self.policy, counts, None, None, report, limits=limits)

    @property
    def replicas(self) -> int:
        return min(self.servers, MOST_REPLICAS)


class System:
    """`links` by name of process or client. `broker` is the way past them. `servers`: those of the broker."""

    def __init__(self, cluster: NatsCluster, users: OpenBroker, links: dict[str, Links], children: Sequence[Child], model: str) -> None:
        self.servers = cluster.servers
        self.broker = users.settings("admin", "", cluster.url)
        self.links = links
        self.children = {child.name: child for child in children}
        self.model = model
        self._users = users

    def client_broker(self, name: str) -> BrokerSettings:
        """By the client's own link."""
        return self._users.settings("client", name, self.links[name].url)

    def pid(self, name: str) -> int:
        """0 while it is not running."""
        return self.children[name].pid


def children(system: LocalSystem, routers: int, users: OpenBroker, links: dict[str, Links], logs: Path) -> list[Child]:
    """As `up` runs them, each as its own user and with the address of its own link, and more routers."""
    [first, *workers] = children_of(system, "", logs)
    named = [
        replace(
            first, name=name, arguments=[name if word == first.name else word for word in first.arguments], log_file=logs / f"{name}.log"
        )
        for name in (f"router-{number}" for number in range(1, routers + 1))
    ]
    return [
        replace(child, environment=users.environment(role_of(child.arguments[0]), links[child.name].url)) for child in [*named, *workers]
    ]


@asynccontextmanager
async def running(shape: Shape, folder: Path, run_id: str, report: Callable[[str], None]) -> AsyncGenerator[System]:
    """Yields when a request was served; at the end everything drains and stops. Raises SetupError for what can never start."""
    os.environ[RUN_VARIABLE] = run_id
    share_cores()
    local, targets = shape.local(report), shape.targets()
    async with AsyncExitStack() as stack:
        users = SecuredBroker(folder / "users", targets.clients) if shape.secured else OpenBroker()
        cluster = await stack.enter_async_context(NatsCluster(folder / "broker", shape.servers, folder / "logs", **users.server_options))
        await wait_until_agreed(users.settings("admin", "", cluster.url))
        await users.declare(cluster.url, shape.replicas, local.model)
        ports = [server.port for server in cluster.servers]
        names = [*targets.workers, *targets.routers, *targets.clients]
        links = {name: await stack.enter_async_context(Links(name, ports, users.tls)) for name in names}
        processes = children(local, shape.routers, users, links, folder / "logs")
        supervisor = Supervisor(processes, shape.grace_s, longest_pause_s=LONGEST_PAUSE_S)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(supervisor.run())
                system = System(cluster, users, links, processes, local.model)
                await wait_until_served(system.broker, local.model)
                try:
                    yield system
                finally:
                    supervisor.stop()
        except BaseExceptionGroup as group:
            ours = group.subgroup(JetwakeError)
            if ours is None:
                raise
            raise first_of(ours) from None


def survivors(run_id: str) -> list[str]:
    """Processes of this run that still live. Zombies do not: they only wait for somebody to ask how they ended."""
    found = list[str]()
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE and process.environ().get(RUN_VARIABLE) == run_id:
                found.append(f"{process.pid} {' '.join(process.cmdline())[:200]}")
        except psutil.Error:
            continue  # it ended while it was looked at, or is somebody else's
    return found
