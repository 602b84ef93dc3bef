"""Where one process hears that it shall drain, and tells how that went: the far end of `jetwake drain`.

Reads `jw.drain.<name>`; answers there, and writes `jw.drained.<name>` as the last word.
"""

import asyncio
import logging
from contextlib import suppress

from ..pipeline.connection import Bus, RawMessage
from ..pipeline.publish import Publisher
from ..schemas import subjects
from ..schemas.codec import decode, encode
from ..schemas.drain import Drained, DrainHeard, DrainOrder
from ..schemas.errors import BrokerUnavailable, Undecodable

log = logging.getLogger(__name__)


class DrainDesk:
    """`role` is a worker's role or `router`. The order sets `stopping`, as SIGTERM does."""

    def __init__(self, bus: Bus, publisher: Publisher, heard: DrainHeard, stopping: asyncio.Event) -> None:
        self._bus = bus
        self._publisher = publisher
        self._heard = heard
        self._stopping = stopping
        self._replies: asyncio.Queue[str] = asyncio.Queue()

    async def listen(self) -> None:
        await self._bus.subscribe(subjects.drain(self._heard.name), self._on_order)

    async def run(self) -> None:
        """Answers orders until cancelled."""
        while True:
            reply = await self._replies.get()
            with suppress(BrokerUnavailable):  # who asked does so again, or sees the drain on the card
                await self._bus.publish(reply, encode(self._heard))

    async def tell(self, in_time: bool, moved_requests: int, took_s: float) -> None:
        log.info("%s: %s after %.1f s, %d requests moved", self._heard.name, "drained" if in_time else "grace over", took_s, moved_requests)
        last_word = Drained(
            name=self._heard.name, incarnation=self._heard.incarnation, in_time=in_time, moved_requests=moved_requests, took_s=took_s
        )
        await self._publisher.send(subjects.drained(self._heard.name), last_word)

    def _on_order(self, message: RawMessage) -> None:
        try:
            order = decode(message.data, DrainOrder)
        except Undecodable as error:
            log.warning("an order to drain that cannot be read: %s", error)
            return
        log.info("%s drains, as it was told to: %s", self._heard.name, order.reason or "no reason given")
        if message.reply:
            self._replies.put_nowait(message.reply)
        self._stopping.set()
