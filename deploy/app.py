"""Composition: the one place where the objects of a router or a worker are built and joined, and where their lives begin and end.

Every `run_*` returns after a drain, or raises the one error that ended it. Tests run these in their own process; the command line
runs one for each process.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from ..pipeline.clock import ServerClock
from ..pipeline.connection import Bus
from ..pipeline.consume import Consumer
from ..pipeline.endings import Endings
from ..pipeline.in_flight import InFlight
from ..pipeline.patience import when_ready
from ..pipeline.publish import Publisher
from ..pipeline.registry import ModelCatalogue, Registry
from ..pipeline.settings import BrokerSettings, TopologySettings
from ..pipeline.terminals import Terminals
from ..pipeline.topology_keeper import TopologyKeeper
from ..producers.explainer import Explainer
from ..producers.index_feed import IndexFeed
from ..producers.policies import make_policy
from ..producers.prefix_index import PrefixIndex
from ..producers.queue_endings import QueueEndings
from ..producers.queue_gauges import QueueGauges
from ..producers.rebalance import Rebalancer
from ..producers.router import Router
from ..producers.silent_workers import SilenceAlarm
from ..producers.standing_queues import StandingQueuesAlarm
from ..producers.takeover import Takeover
from ..schemas.drain import DrainHeard
from ..schemas.errors import JetwakeError
from ..schemas.requests import InferenceRequest
from ..schemas.streams import router_consumer
from .drain_desk import DrainDesk
from .health import Health, HealthTeller, State
from .role_settings import RouterSettings

log = logging.getLogger(__name__)

Loop = Coroutine[Any, Any, None]
SYNC_S = 2.0
"""How long a new router asks workers what their caches hold before it routes without knowing."""


@dataclass(frozen=True)
class Pipe:
    """What every role needs of the pipeline, on one connection."""

    bus: Bus
    publisher: Publisher
    clock: ServerClock
    terminals: Terminals
    endings: Endings
    in_flight: InFlight
    registry: Registry
    keeper: TopologyKeeper

    def loops(self) -> list[Loop]:
        return [self.bus.failed(), self.keeper.run(), self.clock.run(), self.registry.run(), self.in_flight.run()]


@asynccontextmanager
async def open_pipe(broker: BrokerSettings, topology: TopologySettings, name: str) -> AsyncGenerator[Pipe]:
    async with Bus.connect(broker, name=name) as bus:
        keeper = TopologyKeeper(bus, topology)
        await keeper.start()
        publisher, clock = Publisher(bus), ServerClock(bus)
        terminals = Terminals(bus, publisher, clock)
        pipe = Pipe(
            bus=bus,
            publisher=publisher,
            clock=clock,
            terminals=terminals,
            endings=Endings(publisher, terminals),
            in_flight=InFlight(bus, clock),
            registry=Registry(bus),
            keeper=keeper,
        )
        await when_ready(bus, clock.sync)
        await pipe.in_flight.start()
        await pipe.registry.start()
        yield pipe


def index_of(settings: RouterSettings) -> PrefixIndex:
    if settings.approximate_s:
        return PrefixIndex(settings.max_index_blocks, settings.approximate_s, settings.max_index_blocks)
    return PrefixIndex(settings.max_index_blocks)


async def run_router(
    settings: RouterSettings,
    broker: BrokerSettings,
    topology: TopologySettings,
    stopping: asyncio.Event,
    health: HealthTeller | None = None,
) -> None:
    """Routes until `stopping` is set; then finishes what it holds."""
    async with open_pipe(broker, topology, settings.name) as pipe:
        index = index_of(settings)
        feed = IndexFeed(
            pipe.bus,
            pipe.registry,
            index,
            settings.name,
            follows=lambda card: settings.direct or card.role != "decode",
            hears_events=not settings.approximate_s,
        )
        await feed.listen()
        router = Router(
            settings.name,
            settings.policy,
            make_policy(settings.policy, settings.seed, settings.knobs()),
            publisher=pipe.publisher,
            endings=pipe.endings,
            clock=pipe.clock,
            in_flight=pipe.in_flight,
            registry=pipe.registry,
            catalogue=ModelCatalogue(pipe.bus, pipe.publisher),
            index=index,
            alarm=SilenceAlarm(expects_events=not settings.approximate_s),
            direct=settings.direct,
            slots=settings.slots,
        )
        await router.listen(pipe.bus)
        explainer = Explainer(pipe.bus, router, settings.name, settings.policy)
        await explainer.listen()
        consumers = [
            Consumer(
                pipe.bus,
                pipe.publisher,
                router_consumer(priority_class),
                InferenceRequest,
                router.handle,
                room,
                router.fail,
                stage="routing",
                worker=settings.name,
            )
            for priority_class, room in (("interactive", router.room), ("batch", router.batch_room))
        ]
        router.on_idle = consumers[1].room_changed

        desk = DrainDesk(pipe.bus, pipe.publisher, DrainHeard(name=settings.name, role="router"), stopping)
        await desk.listen()

        async def drain() -> None:
            started_s = time.monotonic()
            async with asyncio.TaskGroup() as tasks:
                for consumer in consumers:
                    tasks.create_task(consumer.stop(settings.grace_s))
            took_s = time.monotonic() - started_s
            await desk.tell(in_time=took_s < settings.grace_s, moved_requests=0, took_s=took_s)

        takeover = Takeover(pipe.bus, pipe.publisher, pipe.endings, pipe.registry, settings.name, router.had_taken)

        async def route() -> None:
            await feed.wait_until_synced(SYNC_S)
            if health is not None:
                health.ready(lambda: health_of(pipe.bus, "draining" if stopping.is_set() else "ready"))
            async with asyncio.TaskGroup() as tasks:
                for consumer in consumers:
                    tasks.create_task(consumer.run())

        queue_endings = QueueEndings(pipe.bus, router, pipe.endings, pipe.in_flight)
        alarm = StandingQueuesAlarm(pipe.bus, pipe.registry, router.loads)
        gauges = QueueGauges(pipe.bus, pipe.clock)
        loops = [
            *pipe.loops(),
            desk.run(),
            queue_endings.run(),
            feed.run(),
            explainer.run(),
            gauges.run(),
            takeover.run(),
            alarm.run(),
            route(),
        ]
        if settings.policy == "kv_aware":  # the others are baselines, and do what their names say
            loops.append(Rebalancer(pipe.bus, router, pipe.endings).run())
        await run_until(stopping, loops, drain)


def health_of(bus: Bus, state: State) -> Health:
    """Of a process that is well while it is connected."""
    if state == "ready" and not bus.connected:
        return Health("cut off", "the connection to the broker is lost")
    return Health(state)


async def run_until(stopping: asyncio.Event, loops: list[Loop], drain: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs the loops side by side until `stopping`, then drains and ends them. The first loop that fails ends all of them.

    Raises that loop's JetwakeError itself, not the group around it.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(loop) for loop in loops]
            await stopping.wait()
            await drain()
            for task in running:
                task.cancel()
    except BaseExceptionGroup as group:
        ours = group.subgroup(JetwakeError)
        if ours is None:
            raise
        raise first_of(ours) from group


def first_of(group: BaseExceptionGroup[JetwakeError]) -> JetwakeError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, JetwakeError)
    return error
