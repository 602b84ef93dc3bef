"""The composition of one worker: its engine, its loops and its life, from the start of the engine to the end of the drain."""

import asyncio
import logging
import secrets

from ..consumers.aggregated import AggregatedConsumer
from ..consumers.block_ledger import BlockLedger
from ..consumers.decode import DecodeConsumer
from ..consumers.engine import Engine, EngineInfo
from ..consumers.kv_event_publisher import KvEventPublisher
from ..consumers.leases import HeldHandoffs
from ..consumers.peers import Peers
from ..consumers.prefill import PrefillConsumer, PrefillLimits
from ..consumers.workload import LoadReporter, Workload
from ..pipeline.catalogue import ModelCatalogue
from ..pipeline.consume import Consumer
from ..pipeline.registry import CardKeeper
from ..pipeline.settings import BrokerSettings, TopologySettings
from ..pipeline.topology import delete_consumer, ensure_consumer
from ..schemas.decode import KvHandoff
from ..schemas.errors import EngineDead
from ..schemas.prefill import PrefillJob
from ..schemas.streams import decode_consumer, prefill_consumer
from ..schemas.subjects import model_token
from ..schemas.workers import WorkerCard, pool_name
from .app import Loop, Pipe, WorkerSettings, open_pipe, run_until

log = logging.getLogger(__name__)

ENGINE_LOOK_EVERY_S = 0.5
LOOKS_PER_PING = 10
"""A ping wakes every process of the engine: an idle one should sleep."""
DIRECT_SHARE = 8
"""A decode worker keeps one in so many of its slots for prompts that come without a handoff."""


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
    """The parts of one started worker, joined. One incarnation: made anew after every start of the engine.

    Every worker has a queue of its own (its lane); a decode worker takes handoffs of its pool as well.
    """

    def __init__(self, settings: WorkerSettings, engine: Engine, info: EngineInfo, pipe: Pipe) -> None:
        self._settings = settings
        self._engine = engine
        self._info = info
        self._pipe = pipe
        self._card = card = card_of(settings, info, pipe.clock.now_ns())
        self._keeper = CardKeeper(pipe.bus, pipe.publisher)
        self._peers = Peers(engine, card, self._keeper, pipe.registry)
        self._ledger = BlockLedger(info.capacity_blocks)
        self._held = HeldHandoffs(engine, pipe.clock, pipe.in_flight, pipe.endings, settings.lease_s)
        self._events = KvEventPublisher(engine, card, pipe.bus, pipe.publisher)
        direct_slots = max(1, info.capacity_slots // DIRECT_SHARE) if card.role == "decode" else info.capacity_slots
        self._lane_work = Workload(direct_slots)
        self._works = [self._lane_work]
        self._lane = self._lane_consumer()
        self._consumers: list[Consumer[PrefillJob] | Consumer[KvHandoff]] = [self._lane]
        if card.role == "decode":
            self._works.append(Workload(max(1, info.capacity_slots - direct_slots)))
            self._consumers.append(self._handoff_consumer(self._works[1]))
        self._load = LoadReporter(pipe.publisher, card, self._works, engine, lambda: (self._held.blocks, len(self._held)))
        self._held.on_change = self._lane.room_changed

    async def run(self, stopping: asyncio.Event) -> None:
        pipe = self._pipe
        for consumer in self._consumers:
            await ensure_consumer(pipe.bus, consumer.spec)
        await self._held.listen(pipe.bus, self._card.lane)
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
            self._watch_engine(),
            *(consumer.run() for consumer in self._consumers),
        ]
        try:
            await run_until(stopping, loops, self._drain)
        finally:
            await self._keeper.withdraw()
        await delete_consumer(pipe.bus, self._lane.spec.stream, self._lane.spec.durable)

    async def _drain(self) -> None:
        """Nothing new is taken; what is in hand ends; what is held is pulled, released, or runs into the grace period's end."""
        await self._peers.update_card({"state": "draining"})
        try:
            async with asyncio.timeout(self._settings.grace_s):
                async with asyncio.TaskGroup() as tasks:
                    for consumer in self._consumers:
                        tasks.create_task(consumer.stop(self._settings.grace_s))
                await self._engine.drain()
        except TimeoutError:
            log.warning("%s: grace of %g s is over with work in hand", self._settings.name, self._settings.grace_s)

    async def _watch_engine(self) -> None:
        """Raises EngineDead as soon as a request found the engine dead, or a ping does."""
        looks = 0
        while True:
            await asyncio.sleep(ENGINE_LOOK_EVERY_S)
            looks += 1
            if any(work.engine_dead.is_set() for work in self._works):
                raise EngineDead(f"the engine of {self._settings.name} died with work in hand")
            if looks % LOOKS_PER_PING == 0:
                await self._engine.ping(self._settings.engine_ping_timeout_s)

    def _lane_consumer(self) -> Consumer[PrefillJob]:
        pipe, card = self._pipe, self._card
        loop = self._prefill_loop() if card.role == "prefill" else self._whole_loop()
        spec = prefill_consumer(card.lane)
        return Consumer(pipe.bus, pipe.publisher, spec, PrefillJob, loop.handle, loop.room, loop.fail, stage=card.role, worker=card.worker)

    def _prefill_loop(self) -> PrefillConsumer:
        pipe = self._pipe
        return PrefillConsumer(
            self._engine,
            self._card,
            PrefillLimits(int(self._settings.held_blocks_share * self._info.capacity_blocks), self._settings.hold_s),
            publisher=pipe.publisher,
            terminals=pipe.terminals,
            clock=pipe.clock,
            in_flight=pipe.in_flight,
            held=self._held,
            work=self._lane_work,
        )

    def _whole_loop(self) -> AggregatedConsumer:
        pipe = self._pipe
        return AggregatedConsumer(
            self._engine,
            self._card,
            publisher=pipe.publisher,
            terminals=pipe.terminals,
            in_flight=pipe.in_flight,
            work=self._lane_work,
            ledger=self._ledger,
        )

    def _handoff_consumer(self, work: Workload) -> Consumer[KvHandoff]:
        pipe, card = self._pipe, self._card
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
            alive=lambda: pipe.registry.workers,
        )
        spec = decode_consumer(card.pool)
        return Consumer(pipe.bus, pipe.publisher, spec, KvHandoff, loop.handle, loop.room, loop.fail, stage="decode", worker=card.worker)


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
