"""A whole system for one benchmark: broker, router and workers as processes, with engine options of their own for each role.

Promises: what is measured starts when every decode worker has met every prefill worker and a request was served; after the end
no process and no file is left.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from ..pipeline.connection import Bus
from ..pipeline.registry import Registry, Workers
from ..pipeline.settings import BrokerSettings, TopologySettings
from ..pipeline.topology import ensure_topology
from ..schemas.errors import JetwakeError
from .app import first_of
from .local import children_of, local_system, ready_file, wait_until_served
from .local_gateway import LocalGateway, admin_url
from .nats_server import NatsServer
from .shared_cores import share_cores
from .supervisor import Child, Supervisor


@dataclass(frozen=True)
class BenchSystem:
    engine: str
    model: str
    policy: str
    prefill: int
    decode: int
    prefill_options: Sequence[str]
    decode_options: Sequence[str]
    ready_timeout_s: float
    grace_s: float = 20.0
    gateway: LocalGateway | None = None
    sync_always: bool = True


@dataclass(frozen=True)
class RunningSystem:
    """`processes`: by name, the broker's among them. `admin_url`: of the gateway."""

    broker: BrokerSettings
    processes: dict[str, int]
    admin_url: str = ""


@asynccontextmanager
async def running(system: BenchSystem, report: Callable[[str], None]) -> AsyncGenerator[RunningSystem]:
    """Raises SetupError, or NoWorker when it is not ready in time."""
    share_cores()
    with TemporaryDirectory(prefix="jetwake-bench-") as folder:
        logs = Path(folder) / "logs"
        async with NatsServer(Path(folder) / "broker", log_file=Path(folder) / "broker.log", sync_always=system.sync_always) as server:
            broker = BrokerSettings(url=server.url)
            supervisor = Supervisor(children(system, broker, logs, report), system.grace_s)
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(supervisor.run())
                    await _wait_until_met(broker, system)
                    await wait_until_served(broker, system.model)
                    gateway_url = await admin_url(ready_file(logs)) if system.gateway is not None else ""
                    processes = {"broker": server.pid} | {child.name: child.pid for child in supervisor.children}
                    yield RunningSystem(broker, processes, gateway_url)
                    supervisor.stop()
            except BaseExceptionGroup as group:
                ours = group.subgroup(JetwakeError)
                if ours is None:
                    raise
                raise first_of(ours) from None


def children(system: BenchSystem, broker: BrokerSettings, logs: Path, report: Callable[[str], None]) -> list[Child]:
    """The router, the prefill workers, the decode workers, the gateway."""
    gateway, counts = system.gateway, (system.prefill, system.decode, 0)
    prefill, decode = (
        local_system(system.engine, system.model, "", options, system.policy, counts, None, broker, report, gateway=gateway)
        for options in (system.prefill_options, system.decode_options)
    )
    parts = (replace(prefill, decode=0, gateway=None), replace(decode, prefill=0))
    first, second = (children_of(part, broker.url, logs) for part in parts)
    return [*first, *second[1:]]  # each part comes with a router, and one is enough


async def _wait_until_met(broker: BrokerSettings, system: BenchSystem) -> None:
    def have_met(workers: Workers) -> bool:
        lanes = {card.lane for card in workers.values() if card.role == "prefill"}
        pulling = [card for card in workers.values() if card.role == "decode" and lanes <= set(card.peers)]
        return len(lanes) == system.prefill and len(pulling) == system.decode

    async with Bus.connect(broker, name="bench") as bus:
        await ensure_topology(bus, TopologySettings())
        registry = Registry(bus)
        await registry.start()
        await registry.wait_for(have_met, system.ready_timeout_s)
