"""Follows a pipeline for whoever looks at it. The one part of the dashboard that speaks with the broker all the time.

Reads worker cards, `jw.load.*` and `jw.events.*.*` by plain subscriptions, the events of the last minutes from their stream, and asks for
queue depths once a second and for routers every few. Writes nothing but those questions. Promises: nobody's work is touched, and
what cannot be read is left out.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from pydantic import ValidationError

from ...pipeline.clock import ServerClock
from ...pipeline.connection import Bus, RawMessage
from ...pipeline.jetstream import stored_messages
from ...pipeline.registry import Registry
from ...pipeline.settings import BrokerSettings
from ...pipeline.topology import QueueCount, StreamCount, consumer_counts, queue_progress, stream_counts, subject_counts
from ...schemas import subjects
from ...schemas.codec import decode
from ...schemas.errors import BusError, Undecodable
from ...schemas.events import RequestEnded
from ...schemas.routing import RouterHere
from ...schemas.streams import EVENTS, REQUESTS
from ...schemas.workers import WorkerLoad
from .history import SLOT_S, SLOTS, History
from .state import Known, SeenRouter

log = logging.getLogger(__name__)

MOST_EVENTS = 20_000
"""So many are read back at most: of a pipeline that does more in the time the page looks back, the oldest are missing at first."""
ASK_EVERY_S = 1.0
ROUTERS_EVERY = 5
ROUTER_GONE_S = 12.0
FIRST_LOOK_S = 1.5
"""Workers tell their load at least once a second, and routers answer at once: one that does not in this time is shown without."""


class Observer:
    """`known` and `history` are up to date while `run` runs."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.history = History()
        self._clock = ServerClock(bus)
        self._registry = Registry(bus)
        self._loads: dict[str, bytes] = {}
        self._queues: dict[str, QueueCount] = {}
        self._streams: dict[str, StreamCount] = {}
        self._by_model: dict[str, int] = {}
        self._routers: dict[str, tuple[SeenRouter, float]] = {}
        self._inbox = bus.new_inbox()
        self._heard = asyncio.Event()

    @classmethod
    @asynccontextmanager
    async def open(cls, broker: BrokerSettings, name: str = "dashboard") -> AsyncGenerator["Observer"]:
        """On a connection of its own, so that what it hears delays nobody. Knows the past on entry. Raises BusError."""
        async with Bus.connect(broker, name) as bus:
            observer = cls(bus)
            await observer._start()
            yield observer

    async def _start(self) -> None:
        await self._clock.sync()
        await self.bus.subscribe(subjects.LOADS, self._on_load)
        await self.bus.subscribe(subjects.EVENTS, self._on_event)
        await self.bus.subscribe(self._inbox, self._on_router)
        await self._registry.start()
        await self._ask(0)
        await self._read_past()
        await self._hear_all()

    async def run(self) -> None:
        """Until cancelled, or the connection is closed for good: then it raises BrokerUnavailable."""
        async with asyncio.TaskGroup() as tasks:
            for loop in (self.bus.failed(), self._clock.run(), self._registry.run(), self._ask_on()):
                tasks.create_task(loop)

    async def _hear_all(self) -> None:
        try:
            async with asyncio.timeout(FIRST_LOOK_S):
                while not (self._routers and self._registry.workers.keys() <= self._loads.keys()):
                    self._heard.clear()
                    await self._heard.wait()
        except TimeoutError:
            return

    def known(self) -> Known:
        now_s = asyncio.get_running_loop().time()
        cards = self._registry.workers
        return Known(
            now_ms=self._clock.now_ns() // 1_000_000,
            connected=self.bus.connected,
            cards=cards,
            loads={load.worker + "-" + load.incarnation: load for load in self._readable_loads({card.worker for card in cards.values()})},
            queues=self._queues,
            streams=self._streams,
            by_model=self._by_model,
            routers=tuple(router for _, (router, heard_s) in sorted(self._routers.items()) if now_s - heard_s < ROUTER_GONE_S),
        )

    # -- what is heard ------------------------------------------------------------------------------------------------

    def _on_load(self, message: RawMessage) -> None:
        self._loads[subjects.last_token(message.subject)] = message.data  # up to a hundred a second: read when somebody looks
        self._heard.set()

    def _readable_loads(self, workers: set[str]) -> list[WorkerLoad]:
        found: list[WorkerLoad] = []
        for worker in self._loads.keys() - workers:
            del self._loads[worker]
        for data in self._loads.values():
            try:
                found.append(decode(data, WorkerLoad))
            except Undecodable as error:
                log.debug("a load cannot be read: %s", error)  # of another version: its worker is shown without
        return found

    def _on_event(self, message: RawMessage) -> None:
        try:
            self.history.add(RequestEnded.model_validate_json(message.data))
        except ValidationError as error:
            log.debug("an event on %s cannot be read: %s", message.subject, error)

    def _on_router(self, message: RawMessage) -> None:
        try:
            answer = decode(message.data, RouterHere)
        except Undecodable as error:  # of another version, or the broker's word that nobody listens
            log.debug("a router's answer cannot be read: %s", error)
            return
        self._routers[answer.router] = (SeenRouter(answer.router, answer.policy), asyncio.get_running_loop().time())
        self._heard.set()

    # -- what is asked ------------------------------------------------------------------------------------------------

    async def _read_past(self) -> None:
        messages, gone = await queue_progress(self.bus, EVENTS.name)
        since_ns = self._clock.now_ns() - SLOTS * SLOT_S * 1_000_000_000
        if messages <= MOST_EVENTS:
            past = await stored_messages(self.bus, EVENTS.name, subjects.EVENTS, since_ns=since_ns)
        else:
            past = await stored_messages(self.bus, EVENTS.name, subjects.EVENTS, first_sequence=gone + messages - MOST_EVENTS + 1)
        for message in past:
            self._on_event(message)

    async def _ask_on(self) -> None:
        turn = 1
        while True:
            await asyncio.sleep(ASK_EVERY_S)
            try:
                await self._ask(turn)
            except BusError as error:
                log.info("queues not read, showing what was known: %s", error)
            turn += 1

    async def _ask(self, turn: int) -> None:
        self._queues = await consumer_counts(self.bus)
        several = len({card.model for card in self._registry.workers.values()}) > 1
        self._by_model = await subject_counts(self.bus, REQUESTS.name) if several else {}
        if turn % ROUTERS_EVERY == 0:
            self._streams = await stream_counts(self.bus)
            await self._ask_routers()
        known = self.known()
        self.history.sample(known.now_ms, known.gauges())

    async def _ask_routers(self) -> None:
        await self.bus.publish_with_reply(subjects.ROUTERS, b"", self._inbox)
