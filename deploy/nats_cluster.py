"""Several nats-servers on this machine as one cluster: for chaos runs and tests, and to see what the loss of a server does.

Promises: inside the context every server accepts connections and knows the others; each can be stopped, killed and started again alone.
"""

import asyncio
from pathlib import Path
from typing import Any, Self

from ..pipeline.connection import Bus
from ..pipeline.reserved_port import ReservedPort
from ..pipeline.settings import BrokerSettings
from ..pipeline.topology import streams_not_whole
from ..schemas.errors import BrokerUnavailable, BusError
from .nats_config import ClusterPlace
from .nats_server import NatsServer

LOOK_EVERY_S = 0.25


class NatsCluster:
    """`options`: those of each NatsServer. One server alone is no cluster, and the same to whoever uses it."""

    def __init__(self, folder: Path, count: int, log_folder: Path | None = None, **options: Any) -> None:
        logs = log_folder or folder
        names = [f"broker-{number}" for number in range(1, count + 1)] if count > 1 else ["broker"]
        self._reserved = [ReservedPort() for _ in range(count)] if count > 1 else []
        routes = [f"127.0.0.1:{reserved.port}" for reserved in self._reserved]
        self.servers = [
            NatsServer(
                folder / name,
                log_file=logs / f"{name}.log",
                cluster=ClusterPlace("jetwake", name, routes[number], routes) if routes else None,
                **options,
            )
            for number, name in enumerate(names)
        ]

    async def __aenter__(self) -> Self:
        try:
            await asyncio.gather(*(server.start() for server in self.servers))
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(server.__aexit__() for server in self.servers))
        for reserved in self._reserved:
            reserved.free()

    @property
    def url(self) -> str:
        return ",".join(server.url for server in self.servers)


async def wait_until_agreed(broker: BrokerSettings, timeout_s: float = 30.0) -> None:
    """Until the servers have chosen who leads, and take orders. Raises BrokerUnavailable."""
    async with Bus.connect(broker, "cluster") as bus:
        if missing := await wait_until_whole(bus, timeout_s):
            raise BrokerUnavailable(f"the cluster is not ready after {timeout_s:g} s: {', '.join(missing)}")


async def wait_until_whole(bus: Bus, timeout_s: float) -> list[str]:
    """Until every stream and consumer has a leader and all of its replicas are up to date; what is not so after `timeout_s`."""
    clock = asyncio.get_running_loop().time
    deadline = clock() + timeout_s
    while True:
        try:
            missing = await streams_not_whole(bus)
        except BusError as error:
            missing = [str(error)]
        if not missing or clock() >= deadline:
            return missing
        await asyncio.sleep(LOOK_EVERY_S)
