"""The ways into a gateway beside HTTP: requests and durable jobs over NATS, served by the same application."""

import asyncio

from ..pipeline.clock import ServerClock
from ..pipeline.connection import Bus
from ..pipeline.publish import Publisher
from ..pipeline.replies import ReplyInbox
from ..producers.gateway.front import App
from ..producers.gateway.jobs import Jobs, JobSettings
from ..producers.gateway.nats_door import NatsDoor
from ..producers.gateway.settings import GatewaySettings


class Doors:
    """`start` before the gateway is called ready, `run` beside it, `stop` before its connection closes."""

    def __init__(
        self,
        settings: GatewaySettings,
        bus: Bus,
        publisher: Publisher,
        clock: ServerClock,
        inbox: ReplyInbox,
        app: App,
        names: tuple[str, ...],
    ) -> None:
        self._grace_s = settings.grace_s
        own = JobSettings(settings.name, settings.job_slots, settings.job_timeout_s)
        self._door = NatsDoor(bus, app, names, settings.nats_slots)
        self._jobs = Jobs(bus, publisher, clock, inbox, app, names, own)

    async def start(self) -> None:
        await self._door.start()
        await self._jobs.start()

    async def run(self) -> None:
        await self._jobs.run()

    async def stop(self) -> None:
        """Requests end within the grace; jobs are handed back, as they go on without this gateway."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._door.stop(self._grace_s))
            tasks.create_task(self._jobs.stop(0.0))
