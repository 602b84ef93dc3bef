"""Who is alive: workers keep a card in the bucket `jw_workers` (`cards`), and everybody else keeps a copy of all cards, here.

Reads `$KV.jw_workers.*`. Promises: a card is gone for everybody three to four seconds after its
worker stopped renewing it; nobody is declared dead while the broker is away, nor for as long after as all workers need to
renew; a card is never dropped on our own silence alone, the broker is asked first.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType

from ..schemas.codec import decode
from ..schemas.errors import BusError, NoWorker, Undecodable
from ..schemas.streams import WORKERS_BUCKET
from ..schemas.subjects import last_token
from ..schemas.workers import WorkerCard
from .cards import CARD_TTL_S, HEARTBEAT_S, CardKeeper
from .catalogue import ModelCatalogue
from .connection import Bus, Subscription
from .jetstream import (
    MARKER_REASON_HEADER,
    SEQUENCE_HEADER,
    SUBJECT_HEADER,
    bucket_stream,
    is_present,
    key_subject,
    last_messages,
)
from .patience import when_ready
from .raw import RawMessage

__all__ = ["CARD_TTL_S", "HEARTBEAT_S", "CardKeeper", "ModelCatalogue", "Registry"]

logger = logging.getLogger(__name__)

HOLD_AFTER_OUTAGE_S = CARD_TTL_S + 2 * HEARTBEAT_S
SNAPSHOT_EVERY_S = 10.0
_WORKERS_STREAM = bucket_stream(WORKERS_BUCKET.name)
_ALL_WORKERS = key_subject(WORKERS_BUCKET.name, ">")

Workers = Mapping[str, WorkerCard]


@dataclass(frozen=True, slots=True)
class _Known:
    """`heard`: when it was last renewed, by our own clock. `sequence`: of the stored card last read, 0 before."""

    card: WorkerCard
    heard: float
    sequence: int = 0


class Registry:
    """Everybody else's view. `start` before the first look; `run` beside the work."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._known: dict[str, _Known] = {}
        self._workers: Workers = MappingProxyType({})
        self._listeners: list[Callable[[], None]] = []
        self._changed = asyncio.Event()  # set and replaced on each change: many may wait
        self._heard_during_snapshot: set[str] | None = None
        self._hold_until = 0.0
        self._due = asyncio.Event()
        self._subscription: Subscription | None = None

    @property
    def workers(self) -> Workers:
        """By worker name. Never changes; a new one takes its place."""
        return self._workers

    @property
    def settled(self) -> bool:
        """False after an outage, until everybody alive had time to renew: then a missing card means nothing."""
        return self._bus.connected and asyncio.get_running_loop().time() >= self._hold_until

    def on_change(self, callback: Callable[[], None]) -> None:
        """`callback` runs in the loop when a card came, went or says something new."""
        self._listeners.append(callback)

    async def wait_for(self, predicate: Callable[[Workers], bool], timeout_s: float) -> None:
        """Until `predicate(workers)`. Raises NoWorker after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while not predicate(self._workers):
                    await self._changed.wait()
        except TimeoutError as error:
            raise NoWorker(f"the workers waited for did not come within {timeout_s:g} s; there are {sorted(self._workers)}") from error

    async def start(self) -> None:
        """Knows all cards on return. Raises BusError."""
        self._subscription = await self._bus.subscribe(_ALL_WORKERS, self._receive)
        await self._bus.flush()
        await when_ready(self._bus, self._take_snapshot)

    async def run(self) -> None:
        """Until cancelled: snapshots every ten seconds and after reconnects, and looks for cards that are overdue."""
        remove = self._bus.on_reconnect(self._hold)
        loop = asyncio.get_running_loop()
        next_snapshot = loop.time() + SNAPSHOT_EVERY_S
        try:
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(HEARTBEAT_S / 4):
                        await self._due.wait()
                if not self._bus.connected:
                    await self._bus.wait_connected()
                    await self._hold()
                if self._due.is_set() or loop.time() >= next_snapshot or self._overdue():
                    self._due.clear()
                    next_snapshot = loop.time() + SNAPSHOT_EVERY_S
                    await self._snapshot_or_later()
        finally:
            remove()

    # -- what is known ----------------------------------------------------------------------------------------------

    async def _hold(self) -> None:
        """After an outage all cards are gone together; nobody is dead before everybody had time to renew."""
        self._hold_until = asyncio.get_running_loop().time() + HOLD_AFTER_OUTAGE_S
        self._due.set()

    def _overdue(self) -> bool:
        """Somebody was not heard for a card's whole life. That our own loop stood still is the other explanation: so ask."""
        now = asyncio.get_running_loop().time()
        return now >= self._hold_until and any(now - known.heard > CARD_TTL_S for known in self._known.values())

    async def _snapshot_or_later(self) -> None:
        try:
            await self._take_snapshot()
        except BusError as error:
            logger.warning("cards not read, keeping what is known: %s", error)

    async def _take_snapshot(self) -> None:
        self._heard_during_snapshot = set()
        try:
            messages = await last_messages(self._bus, _WORKERS_STREAM, _ALL_WORKERS)
            heard = self._heard_during_snapshot
        finally:
            self._heard_during_snapshot = None
        found: set[str] = set()
        for message in messages:
            worker = last_token(message.headers.get(SUBJECT_HEADER, message.subject))
            if worker not in heard and is_present(message):
                found.add(worker)
                self._learn(worker, message.data, int(message.headers.get(SEQUENCE_HEADER, "0")))
        now = asyncio.get_running_loop().time()
        if now >= self._hold_until:
            for worker in set(self._known) - found - heard:
                if now - self._known[worker].heard > CARD_TTL_S:  # else the bucket itself was lost, and its owner renews it
                    logger.info("worker %s is gone: its card has expired", worker)
                    del self._known[worker]
        self._show()

    def _receive(self, message: RawMessage) -> None:
        worker = last_token(message.subject)
        if self._heard_during_snapshot is not None:
            self._heard_during_snapshot.add(worker)
        if is_present(message):
            self._learn(worker, message.data)
        elif MARKER_REASON_HEADER in message.headers and self._was_heard_lately(worker):
            # A cluster without a leader of this bucket stores no renewals, and the next leader finds all cards expired. We heard them.
            logger.info("the card of worker %s has expired, and it lives: the broker could not store its renewals", worker)
        elif self._known.pop(worker, None) is not None:
            logger.info("worker %s has left", worker)
        self._show()

    def _was_heard_lately(self, worker: str) -> bool:
        known = self._known.get(worker)
        return known is not None and asyncio.get_running_loop().time() - known.heard < CARD_TTL_S - HEARTBEAT_S / 2

    def _learn(self, worker: str, data: bytes, sequence: int = 0) -> None:
        try:
            card = decode(data, WorkerCard)
        except Undecodable as error:
            logger.warning("the card of %s cannot be read: %s", worker, error)
            return
        old, heard = self._known.get(worker), asyncio.get_running_loop().time()
        if old is not None and old.card == card:
            card = old.card
            if sequence and old.sequence in (0, sequence):  # the stored card is the one we know: it is no sign of life
                heard = old.heard
        self._known[worker] = _Known(card, heard, sequence)

    def _show(self) -> None:
        """Replaces the public view when it says something new."""
        view = {worker: known.card for worker, known in self._known.items()}
        if view == self._workers:
            return
        self._workers = MappingProxyType(view)
        for listener in self._listeners:
            listener()
        self._changed.set()
        self._changed = asyncio.Event()
