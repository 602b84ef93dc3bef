"""The composition of one worker: its engine, its loops and its life, from the start of the engine to the end of the drain.

Promises: an engine that stands still with work in hand is noticed within `stall_limit_s`, and the process ends to be replaced; a
worker that was taken for dead goes on as a new incarnation, with the same engine; `worker_drain` has the drain.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress

from ..consumers.aggregated import AggregatedConsumer
from ..consumers.block_ledger import BlockLedger
from ..consumers.claims import Claims
from ..consumers.continuing import Continuing
from ..consumers.decode import DecodeConsumer
from ..consumers.engine import Engine, EngineInfo
from ..consumers.handoff_queues import HandoffQueues
from ..consumers.kv_event_publisher import KvEventPublisher
from ..consumers.leases import HeldHandoffs
from ..consumers.link_probe import LinkProbes
from ..consumers.peers import Peers
from ..consumers.prefill import PrefillConsumer, PrefillLimits
from ..consumers.workload import DECODE_REPORT_AT_MOST_EVERY_S, REPORT_AT_MOST_EVERY_S, LoadReporter, Workload
from ..pipeline.catalogue import ModelCatalogue
from ..pipeline.consume import Consumer
from ..pipeline.patience import when_ready
from ..pipeline.registry import CardKeeper
from ..pipeline.settings import BrokerSettings, TopologySettings
from ..pipeline.topology import consumer_count, delete_consumer, ensure_consumer, stream_created_ns
from ..schemas.decode import KvHandoff
from ..schemas.drain import DrainHeard
from ..schemas.errors import BusError, DeclaredDead, EngineDead, JetwakeError
from ..schemas.prefill import PrefillJob
from ..schemas.streams import PREFILL, ConsumerSpec, prefill_consumer
from ..schemas.subjects import model_token
from ..schemas.workers import WorkerCard, pool_name
from .app import Loop, Pipe, first_of, health_of, open_pipe, run_until
from .drain_desk import DrainDesk
from .health import Health, HealthTeller
from .role_settings import WorkerSettings
from .worker_drain import WorkerDrain

log = logging.getLogger(__name__)

ENGINE_LOOK_EVERY_S = 0.5
PING_EVERY_S = 5.0
"""A ping wakes every process of the engine: an idle one should sleep."""
LET_GO_S = 2.0
"""How long a worker with a dead engine takes to give its work to others before it ends. What it leaves is found by them, later."""
DIRECT_SHARE = 8
"""A decode worker keeps one in so many of its slots for prompts that come without a handoff."""


async def run_worker(
    settings: WorkerSettings,
    engine: Engine,
    broker: BrokerSettings,
    topology: TopologySettings,
    stopping: asyncio.Event,
    health: HealthTeller | None = None,
) -> None:
    """Works until `stopping` is set; then drains. Raises EngineDead when the engine is: the process must end and be replaced."""
    info: EngineInfo | None = None
    cached: dict[int, None] = {}
    try:
        while True:
            async with open_pipe(broker, topology, settings.name) as pipe:
                info = info or await engine.start()
                try:
                    worker = Worker(settings, engine, info, pipe, cached)
                    if health is not None:
                        health.ready(worker.health)
                    await worker.run(stopping)
                    return
                except DeclaredDead as error:
                    log.warning("%s goes on as a new incarnation: %s", settings.name, error)
    finally:
        await engine.stop()


class Worker:
    """The parts of one started worker, joined. One incarnation: made anew after every start of the engine, and after others took
    the last one for dead. `cached`: by hash, what the engine's cache is known to hold; kept over incarnations.

    Every worker has a queue of its own (its lane); a decode worker takes handoffs of its pool as well.
    """

    def __init__(self, settings: WorkerSettings, engine: Engine, info: EngineInfo, pipe: Pipe, cached: dict[int, None]) -> None:
        self._settings = settings
        self._engine = engine
        self._info = info
        self._pipe = pipe
        self._card = card = card_of(settings, info, pipe.clock.now_ns())
        self._keeper = CardKeeper(pipe.bus, pipe.publisher)
        self._peers = Peers(engine, card, self._keeper, pipe.registry)
        self._ledger = BlockLedger(info.capacity_blocks, settings.room_limit_s)
        self._continuing = Continuing(pipe.bus, pipe.publisher, pipe.terminals)
        self._limits = PrefillLimits(int(settings.held_blocks_share * info.capacity_blocks), settings.hold_s)
        self._held = HeldHandoffs(engine, pipe.clock, pipe.in_flight, pipe.endings, settings.lease_s, self._limits.held_blocks)
        self._events = KvEventPublisher(engine, card, pipe.bus, pipe.publisher, cached)
        direct_slots = max(1, info.capacity_slots // DIRECT_SHARE) if card.role == "decode" else info.capacity_slots
        self._lane_work = Workload(direct_slots, self._events.untold)
        self._works = [self._lane_work]
        self._room: Callable[[], int] = lambda: 0
        self._lane = self._lane_consumer()
        self._consumers: list[Consumer[PrefillJob] | HandoffQueues] = [self._lane]
        if card.role == "decode":
            self._works.append(Workload(max(1, info.capacity_slots - direct_slots)))
            self._consumers.append(self._handoff_queues(self._works[1]))
        self._load = LoadReporter(
            pipe.publisher,
            card,
            self._works,
            engine,
            held=lambda: (self._held.blocks, len(self._held)),
            room=self._room,
            promised=self._ledger.promised_blocks,
            at_most_every_s=DECODE_REPORT_AT_MOST_EVERY_S if card.role == "decode" else REPORT_AT_MOST_EVERY_S,
        )
        self._held.on_change = self._lane.room_changed
        self._announced = False

    async def run(self, stopping: asyncio.Event) -> None:
        """Raises EngineDead, DeclaredDead."""
        pipe, card = self._pipe, self._card
        await when_ready(pipe.bus, self._declare_queues)
        await self._held.listen(pipe.bus, card.lane)
        await self._events.listen()
        catalogue = ModelCatalogue(pipe.bus, pipe.publisher)
        await catalogue.put(self._info.model)
        await self._peers.meet()
        await self._keeper.announce(self._peers.card)
        self._announced = True
        heard = DrainHeard(name=card.worker, role=card.role, incarnation=card.incarnation)
        desk = DrainDesk(pipe.bus, pipe.publisher, heard, stopping)
        await desk.listen()
        probes = LinkProbes(pipe.bus, card, lambda: sum(work.in_hand for work in self._works))
        await probes.listen()
        loops: list[Loop] = [
            *pipe.loops(),
            catalogue.keep(self._info.model),
            self._keeper.run(),
            self._load.run(),
            desk.run(),
            probes.run(),
            *(self._letting_go(loop) for loop in (self._events.run(), self._peers.run(), self._held.run())),
            *(self._letting_go(loop) for loop in (self._ping_engine(), self._watch_engine())),
            *(consumer.run() for consumer in self._consumers),
        ]
        drain = WorkerDrain(pipe, self._engine, self._held, self._lane, self._consumers, self._settings.grace_s)

        async def drain_and_tell() -> None:
            await self._peers.update_card({"state": "draining"})
            outcome = await drain.run()
            await desk.tell(outcome.in_time, outcome.moved_requests, outcome.took_s)

        try:
            await run_until(stopping, loops, drain_and_tell)
        finally:
            await self._keeper.withdraw()
        with suppress(BusError):  # then routers remove it, as those of the dead
            await delete_consumer(pipe.bus, self._lane.spec.stream, self._lane.spec.durable)

    async def _declare_queues(self) -> None:
        await ensure_consumer(self._pipe.bus, self._lane.spec)
        for consumer in self._consumers:
            if isinstance(consumer, HandoffQueues):
                await consumer.declare()

    def health(self) -> Health:
        return health_of(self._pipe.bus, self._peers.card.state) if self._announced else Health("starting")

    async def _ping_engine(self) -> None:
        """Raises EngineDead when a process of the engine does not answer."""
        while True:
            await asyncio.sleep(PING_EVERY_S)
            await self._engine.ping(self._settings.stall_limit_s)

    async def _watch_engine(self) -> None:
        """Raises EngineDead as soon as a request found the engine dead or its transfers broken, or it holds work and stands still.

        While blocks wait to be pulled, legs may wait for room without being stuck: then only the ping tells.
        """
        while True:
            await asyncio.sleep(ENGINE_LOOK_EVERY_S)
            if any(work.engine_dead.is_set() for work in self._works):
                raise EngineDead(f"the engine of {self._settings.name} died with work in hand")
            if not len(self._held) and (age_s := self._engine.stats().last_step_age_s) > self._settings.stall_limit_s:
                raise EngineDead(f"the engine of {self._settings.name} made no progress for {age_s:.0f} s with work in hand")

    async def _letting_go(self, loop: Loop) -> None:
        """What ends it is told to others first: that this worker is out, and which work is theirs now."""
        try:
            await loop
        except* EngineDead as group:
            error = first_of(group)
            await self._let_go(error)
            raise error from group

    async def _let_go(self, error: JetwakeError) -> None:
        """No more work comes, and what is in hand is given to others, as far as a moment is enough for that."""
        log.error("%s takes no more work and ends: %s", self._settings.name, error)
        for work in self._works:
            work.engine_dead.set()
        for consumer in self._consumers:
            consumer.room_changed()
        with suppress(TimeoutError, BusError):
            async with asyncio.timeout(LET_GO_S):
                await self._peers.update_card({"state": "stalled"})
                self._pipe.in_flight.leave(error)
                while any(consumer.in_hand for consumer in self._consumers):
                    await asyncio.sleep(0.01)

    async def _lane_is_ours(self) -> None:
        """When this worker's own consumer may be gone. Raises DeclaredDead when others took it away, with the queue behind it."""
        bus = self._pipe.bus
        if await consumer_count(bus, self._lane.spec) is not None:
            return
        made_ns = await stream_created_ns(bus, PREFILL.name)
        if made_ns is not None and made_ns < self._card.started_ns:
            raise DeclaredDead(f"the queue of {self._card.lane} was taken away: this worker was silent for too long")
        await ensure_consumer(bus, self._lane.spec)  # the broker lost its store, and everybody begins anew

    def _lane_consumer(self) -> Consumer[PrefillJob]:
        pipe, card = self._pipe, self._card
        loop = self._prefill_loop() if card.role == "prefill" else self._whole_loop()
        self._room = loop.room
        spec = prefill_consumer(card.lane)
        return Consumer(
            pipe.bus,
            pipe.publisher,
            spec,
            PrefillJob,
            loop.handle,
            loop.room,
            loop.fail,
            stage=card.role,
            worker=card.worker,
            again=loop.again,
            declare=self._lane_is_ours,
        )

    def _prefill_loop(self) -> PrefillConsumer:
        pipe = self._pipe
        return PrefillConsumer(
            self._engine,
            self._card,
            self._limits,
            publisher=pipe.publisher,
            terminals=pipe.terminals,
            clock=pipe.clock,
            in_flight=pipe.in_flight,
            held=self._held,
            work=self._lane_work,
            continuing=self._continuing,
        )

    def _whole_loop(self) -> AggregatedConsumer:
        pipe = self._pipe
        return AggregatedConsumer(
            self._engine,
            self._card,
            publisher=pipe.publisher,
            terminals=pipe.terminals,
            clock=pipe.clock,
            in_flight=pipe.in_flight,
            work=self._lane_work,
            continuing=self._continuing,
            ledger=self._ledger,
        )

    def _handoff_queues(self, work: Workload) -> HandoffQueues:
        pipe, card = self._pipe, self._card

        def alive() -> Mapping[str, WorkerCard]:
            return pipe.registry.workers

        loop = DecodeConsumer(
            self._engine,
            self._info,
            card,
            publisher=pipe.publisher,
            terminals=pipe.terminals,
            clock=pipe.clock,
            in_flight=pipe.in_flight,
            work=work,
            ledger=self._ledger,
            alive=alive,
            claims=Claims(pipe.bus, pipe.publisher, card.lane, alive),
            continuing=self._continuing,
        )
        self._room = loop.room

        def consumer(spec: ConsumerSpec, wanted: Callable[[], Mapping[int, int]], moved: Callable[[], None]) -> Consumer[KvHandoff]:
            return Consumer(
                pipe.bus,
                pipe.publisher,
                spec,
                KvHandoff,
                loop.handle,
                loop.room,
                loop.fail,
                stage="decode",
                worker=card.worker,
                again=loop.again,
                wanted=wanted,
                moved=moved,
            )

        return HandoffQueues(pipe.bus, pipe.registry, card, loop.room, loop.load, consumer)


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
