"""Who is alive: workers keep a card in the bucket `jw_workers`, and everybody else keeps a copy of all cards. And the models.

Reads and writes `$KV.jw_workers.*` and `$KV.jw_models.*`. Promises: a card is gone for everybody three to four seconds after its
worker stopped renewing it; nobody is declared dead while the broker is away, nor for as long after as all workers need to
renew; a card is never dropped on our own silence alone, the broker is asked first.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from ..schemas.codec import decode, encode
from ..schemas.errors import BusError, NoWorker, Undecodable
from ..schemas.streams import MODELS_BUCKET, WORKERS_BUCKET
from ..schemas.subjects import last_token, model_token
from ..schemas.workers import ModelCard, WorkerCard
from .connection import Bus, Subscription
from .jetstream import (
    KV_OPERATION_HEADER,
    MARKER_REASON_HEADER,
    ROLLUP_HEADER,
    SEQUENCE_HEADER,
    SUBJECT_HEADER,
    bucket_stream,
    key_subject,
    last_message,
    last_messages,
)
from .publish import Publisher
from .raw import RawMessage

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
CARD_TTL_S = 3
HOLD_AFTER_OUTAGE_S = CARD_TTL_S + 2 * HEARTBEAT_S
SNAPSHOT_EVERY_S = 10.0
_WITHDRAWN_TTL_S = 5
_WORKERS_STREAM = bucket_stream(WORKERS_BUCKET.name)
_ALL_WORKERS = key_subject(WORKERS_BUCKET.name, ">")

Workers = Mapping[str, WorkerCard]


class CardKeeper:
    """A worker's own card: announced, renewed each second by `run`, withdrawn at the end."""

    def __init__(self, bus: Bus, publisher: Publisher) -> None:
        self._bus = bus
        self._publisher = publisher
        self._card: WorkerCard | None = None
        self._turn = asyncio.Lock()  # so that no renewal lands behind a withdrawal
        self._renew_now = asyncio.Event()

    async def announce(self, card: WorkerCard) -> None:
        """Returns when the broker has it."""
        async with self._turn:
            self._card = card
            await self._put(card)

    async def update(self, card: WorkerCard) -> None:
        await self.announce(card)

    async def withdraw(self) -> None:
        """Gone for everybody at once."""
        async with self._turn:
            card, self._card = self._card, None
            if card is not None:
                purge = {KV_OPERATION_HEADER: "PURGE", ROLLUP_HEADER: "sub"}
                await self._publisher.store_bytes(self._subject(card), b"", headers=purge, ttl_s=_WITHDRAWN_TTL_S)

    async def run(self) -> None:
        """Until cancelled. A renewal that fails is logged and followed by the next one."""
        remove = self._bus.on_reconnect(self._renew_soon)
        try:
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(HEARTBEAT_S):
                        await self._renew_now.wait()
                self._renew_now.clear()
                await self._renew()
        finally:
            remove()

    async def _renew_soon(self) -> None:
        self._renew_now.set()

    async def _renew(self) -> None:
        async with self._turn:
            if self._card is None or not self._bus.connected:
                return
            try:
                # One try, no resending: the next renewal is due before a second try would be worth anything.
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._put(self._card)
            except (BusError, TimeoutError) as error:
                logger.warning("the card of %s was not renewed: %s", self._card.worker, error or "no answer in time")

    async def _put(self, card: WorkerCard) -> None:
        await self._publisher.store_bytes(self._subject(card), encode(card), ttl_s=CARD_TTL_S)

    @staticmethod
    def _subject(card: WorkerCard) -> str:
        return key_subject(WORKERS_BUCKET.name, card.worker)


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
        await self._take_snapshot()

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
            if worker not in heard and _kind_of(message) == "card":
                found.add(worker)
                self._learn(worker, message.data, int(message.headers.get(SEQUENCE_HEADER, "0")))
        if asyncio.get_running_loop().time() >= self._hold_until:
            for worker in set(self._known) - found - heard:
                logger.info("worker %s is gone: its card has expired", worker)
                del self._known[worker]
        self._show()

    def _receive(self, message: RawMessage) -> None:
        worker = last_token(message.subject)
        if self._heard_during_snapshot is not None:
            self._heard_during_snapshot.add(worker)
        if _kind_of(message) == "card":
            self._learn(worker, message.data)
        elif self._known.pop(worker, None) is not None:
            logger.info("worker %s has left", worker)
        self._show()

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


def _kind_of(message: RawMessage) -> Literal["card", "gone"]:
    """A purge, a delete and the broker's own mark of an expiry all say that the key is gone."""
    gone = KV_OPERATION_HEADER in message.headers or MARKER_REASON_HEADER in message.headers
    return "gone" if gone else "card"


class ModelCatalogue:
    """Models that some worker announced once. They stay when the last worker goes, so that requests wait instead of being refused."""

    def __init__(self, bus: Bus, publisher: Publisher) -> None:
        self._bus = bus
        self._publisher = publisher

    async def put(self, card: ModelCard) -> None:
        await self._publisher.store_bytes(self._subject(card.model), encode(card))

    async def get(self, model: str) -> ModelCard | None:
        message = await last_message(self._bus, bucket_stream(MODELS_BUCKET.name), self._subject(model))
        return decode(message.data, ModelCard) if message is not None and _kind_of(message) == "card" else None

    async def all(self) -> list[ModelCard]:
        """By name."""
        messages = await last_messages(self._bus, bucket_stream(MODELS_BUCKET.name), self._subject_of_all)
        cards: list[ModelCard] = []
        for message in messages:
            if _kind_of(message) == "card":
                try:
                    cards.append(decode(message.data, ModelCard))
                except Undecodable as error:
                    logger.warning("a model card cannot be read: %s: %s", message.headers.get(SUBJECT_HEADER, ""), error)
        return sorted(cards, key=lambda card: card.model)

    _subject_of_all = key_subject(MODELS_BUCKET.name, ">")

    @staticmethod
    def _subject(model: str) -> str:
        return key_subject(MODELS_BUCKET.name, model_token(model))
