"""A worker's own card in the bucket `jw_workers`, kept alive while the worker is.

Writes `$KV.jw_workers.<worker>`. Promises: the card is renewed each second and has a life of three; after `withdraw` it is gone
for everybody at once, and no renewal comes after it.
"""

import asyncio
import logging
from contextlib import suppress

from ..schemas.codec import encode
from ..schemas.errors import BusError
from ..schemas.streams import WORKERS_BUCKET
from ..schemas.workers import WorkerCard
from .connection import Bus
from .jetstream import KV_OPERATION_HEADER, ROLLUP_HEADER, key_subject
from .publish import Publisher

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
CARD_TTL_S = 3
_WITHDRAWN_TTL_S = 5


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
