"""Composition: the one place where the objects of a router or a worker are built and joined, and where their lives begin and end.

Every `run_*` returns after a drain, or raises the one error that ended it. Tests run these in their own process; the command line
runs one for each process.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from ..consumers.aggregated import AggregatedConsumer
from ..consumers.decode import DecodeConsumer
from ..consumers.engine import Engine, EngineInfo
from ..consumers.kv_event_publisher import KvEventPublisher
from ..consumers.leases import HeldHandoffs
from ..consumers.peers import Peers
from ..consumers.prefill import PrefillConsumer, PrefillLimits
from ..consumers.workload import LoadReporter, Workload
from ..pipeline.clock import ServerClock
from ..pipeline.connection import Bus
from ..pipeline.consume import Consumer
from ..pipeline.endings import Endings
from ..pipeline.in_flight import InFlight
from ..pipeline.publish import Publisher
from ..pipeline.registry import CardKeeper, ModelCatalogue, Registry
from ..pipeline.settings import BrokerSettings, TopologySettings
from ..pipeline.terminals import Terminals
from ..pipeline.topology import delete_consumer, ensure_consumer, ensure_topology
from ..producers.explainer import Explainer
from ..producers.index_feed import IndexFeed
from ..producers.policies import DEFAULT_POLICY, make_policy
from ..producers.prefix_index import PrefixIndex
from ..producers.router import Router
from ..producers.takeover import Takeover
from ..schemas.decode import KvHandoff
from ..schemas.errors import EngineDead, JetwakeError
from ..schemas.prefill import PrefillJob
from ..schemas.requests import InferenceRequest
from ..schemas.streams import decode_consumer, prefill_consumer, router_consumer
from ..schemas.subjects import model_token
from ..schemas.workers import Role, WorkerCard, pool_name

log = logging.getLogger(__name__)

Loop = Coroutine[Any, Any, None]
SYNC_S = 2.0
"""How long a new router asks workers what their caches hold before it routes without knowing."""


class WorkerSettings(BaseModel):
    """One worker. `held_blocks_share`: it stops fetching while more than this share of its KV cache waits to be pulled."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    role: Role
    domain: str = ""
    held_blocks_share: float = Field(default=0.5, gt=0.0, le=1.0)
    hold_s: float = Field(default=120.0, gt=0.0, description="how long a handoff may wait unclaimed before its blocks are freed")
    lease_s: float = Field(default=30.0, gt=0.0)
    engine_ping_timeout_s: float = Field(default=60.0, gt=0.0)
    grace_s: float = Field(default=30.0, gt=0.0, description="how long a drain may take")


class RouterSettings(BaseModel):
    """One router. `slots`: requests it decides on at the same time."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(default="router-1", pattern=r"^[A-Za-z0-9_-]{1,64}$")
    policy: str = DEFAULT_POLICY
    seed: int = 0
    max_index_blocks: int = Field(default=2_000_000, ge=1, description="distinct KV blocks remembered over all workers")
    approximate_s: float = Field(
        default=0.0, ge=0.0, description="for engines without cache events: believe own decisions this long, and nothing else"
    )
    slots: int = Field(default=64, ge=1)
    grace_s: float = Field(default=10.0, gt=0.0)


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

    def loops(self) -> list[Loop]:
        return [self.bus.failed(), self.clock.run(), self.registry.run()]


@asynccontextmanager
async def open_pipe(broker: BrokerSettings, topology: TopologySettings, name: str) -> AsyncGenerator[Pipe]:
    async with Bus.connect(broker, name=name) as bus:
        await ensure_topology(bus, topology)
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
        )
        await clock.sync()
        await pipe.in_flight.start()
        await pipe.registry.start()
        yield pipe


def index_of(settings: RouterSettings) -> PrefixIndex:
    if settings.approximate_s:
        return PrefixIndex(settings.max_index_blocks, settings.approximate_s, settings.max_index_blocks)
    return PrefixIndex(settings.max_index_blocks)


async def run_router(settings: RouterSettings, broker: BrokerSettings, topology: TopologySettings, stopping: asyncio.Event) -> None:
    """Routes until `stopping` is set; then finishes what it holds."""
    async with open_pipe(broker, topology, settings.name) as pipe:
        index = index_of(settings)
        feed = IndexFeed(pipe.bus, pipe.registry, index, settings.name, hears_events=not settings.approximate_s)
        await feed.listen()
        router = Router(
            settings.name,
            settings.policy,
            make_policy(settings.policy, settings.seed),
            publisher=pipe.publisher,
            endings=pipe.endings,
            clock=pipe.clock,
            in_flight=pipe.in_flight,
            registry=pipe.registry,
            catalogue=ModelCatalogue(pipe.bus, pipe.publisher),
            index=index,
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

        async def drain() -> None:
            async with asyncio.TaskGroup() as tasks:
                for consumer in consumers:
                    tasks.create_task(consumer.stop(settings.grace_s))

        takeover = Takeover(pipe.bus, pipe.publisher, pipe.endings, pipe.registry, settings.name)

        async def route() -> None:
            await feed.wait_until_synced(SYNC_S)
            async with asyncio.TaskGroup() as tasks:
                for consumer in consumers:
                    tasks.create_task(consumer.run())

        await run_until(stopping, [*pipe.loops(), feed.run(), explainer.run(), takeover.run(), route()], drain)


async def run_worker(
    settings: WorkerSettings, engine: Engine, broker: BrokerSettings, topology: TopologySettings, stopping: asyncio.Event
) -> None:
    """Works until `stopping` is set; then drains. Raises EngineDead when the engine is: the process must end and be replaced."""
    async with open_pipe(broker, topology, settings.name) as pipe:
        try:
            info = await engine.start()
            await Worker(settings, engine, info, pipe).run(stopping)
        finally:
            await engine.stop()


class Worker:
    """The parts of one started worker, joined. One incarnation: made anew after every start of the engine."""

    def __init__(self, settings: WorkerSettings, engine: Engine, info: EngineInfo, pipe: Pipe) -> None:
        self._settings = settings
        self._engine = engine
        self._info = info
        self._pipe = pipe
        self._card = card_of(settings, info, pipe.clock.now_ns())
        self._keeper = CardKeeper(pipe.bus, pipe.publisher)
        self._peers = Peers(engine, self._card, self._keeper, pipe.registry)
        self._work = Workload(info.capacity_slots)
        self._held = HeldHandoffs(engine, pipe.clock, pipe.in_flight, pipe.endings, settings.lease_s)
        self._load = LoadReporter(pipe.publisher, self._card, self._work, engine, lambda: (self._held.blocks, len(self._held)))
        self._events = KvEventPublisher(engine, self._card, pipe.bus, pipe.publisher)
        self._consumer = self._make_consumer()
        self._held.on_change = self._consumer.room_changed

    async def run(self, stopping: asyncio.Event) -> None:
        card, pipe = self._card, self._pipe
        await ensure_consumer(pipe.bus, self._consumer.spec)
        await self._held.listen(pipe.bus, card.lane)
        await self._events.listen()
        await ModelCatalogue(pipe.bus, pipe.publisher).put(self._info.model)
        await self._peers.meet()
        await self._keeper.announce(self._peers.card)
        loops: list[Loop] = [
            *pipe.loops(),
            self._keeper.run(),
            self._load.run(),
            self._events.run(),
            self._peers.run(),
            self._held.run(),
            self._consumer.run(),
            self._watch_engine(),
        ]
        try:
            await run_until(stopping, loops, self._drain)
        finally:
            await self._keeper.withdraw()
        if card.role != "decode":
            await delete_consumer(pipe.bus, self._consumer.spec.stream, self._consumer.spec.durable)

    async def _drain(self) -> None:
        """Nothing new is taken; what is in hand ends; what is held is pulled, released, or runs into the grace period's end."""
        await self._peers.update_card({"state": "draining"})
        try:
            async with asyncio.timeout(self._settings.grace_s):
                await self._consumer.stop(self._settings.grace_s)
                await self._engine.drain()
        except TimeoutError:
            log.warning("%s: grace of %g s is over with work in hand", self._settings.name, self._settings.grace_s)

    async def _watch_engine(self) -> None:
        """Raises EngineDead as soon as a request found the engine dead, or a ping does."""
        while True:
            try:
                async with asyncio.timeout(2.0):
                    await self._work.engine_dead.wait()
            except TimeoutError:
                await self._engine.ping(self._settings.engine_ping_timeout_s)
            else:
                raise EngineDead(f"the engine of {self._settings.name} died with work in hand")

    def _make_consumer(self) -> Consumer[PrefillJob] | Consumer[KvHandoff]:
        pipe, card, settings = self._pipe, self._card, self._settings
        if card.role == "decode":
            decode = DecodeConsumer(
                self._engine,
                self._info,
                card,
                publisher=pipe.publisher,
                terminals=pipe.terminals,
                clock=pipe.clock,
                in_flight=pipe.in_flight,
                work=self._work,
                alive=lambda: pipe.registry.workers,
            )
            spec = decode_consumer(card.pool)
            return Consumer(
                pipe.bus, pipe.publisher, spec, KvHandoff, decode.handle, decode.room, decode.fail, stage="decode", worker=card.worker
            )
        if card.role == "prefill":
            worker: PrefillConsumer | AggregatedConsumer = PrefillConsumer(
                self._engine,
                card,
                PrefillLimits(int(settings.held_blocks_share * self._info.capacity_blocks), settings.hold_s),
                publisher=pipe.publisher,
                terminals=pipe.terminals,
                clock=pipe.clock,
                in_flight=pipe.in_flight,
                held=self._held,
                work=self._work,
            )
        else:
            worker = AggregatedConsumer(
                self._engine,
                card,
                publisher=pipe.publisher,
                terminals=pipe.terminals,
                in_flight=pipe.in_flight,
                work=self._work,
            )
        spec = prefill_consumer(card.lane)
        return Consumer(
            pipe.bus, pipe.publisher, spec, PrefillJob, worker.handle, worker.room, worker.fail, stage=card.role, worker=card.worker
        )


def card_of(settings: WorkerSettings, info: EngineInfo, now_ns: int) -> WorkerCard:
    return WorkerCard(
        worker=settings.name,
        incarnation=secrets.token_hex(4),
        role=settings.role,
        model=info.model.model,
        pool=pool_name(model_token(info.model.model), info.compatibility),
        compatibility=info.compatibility,
        capacity_blocks=info.capacity_blocks,
        capacity_slots=info.capacity_slots,
        max_model_len_tokens=info.model.max_model_len_tokens,
        domain=settings.domain,
        engine_id=info.engine_id,
        side_channel_host=info.side_channel_host,
        side_channel_port=info.side_channel_port,
        started_ns=now_ns,
    )


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
