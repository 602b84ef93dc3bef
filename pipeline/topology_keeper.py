"""Keeps the broker in its declared state while a process lives: what a restart, a lost store or an operator took away is declared again.

Reads and writes the JetStream API through `topology`. Promises: after each reconnect, and at most `LOOK_EVERY_S` after anything was
deleted, the streams, buckets and shared consumers are there. A process whose permissions forbid that leaves it to those that may.
"""

import asyncio
import logging

from ..schemas.errors import BusError, NotPermitted
from .connection import Bus
from .settings import TopologySettings
from .topology import ensure_topology, restore_missing

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 2.0


class TopologyKeeper:
    """`start` before anything else asks to be called after reconnects: the others need the streams."""

    def __init__(self, bus: Bus, settings: TopologySettings) -> None:
        self._bus = bus
        self._settings = settings

    async def start(self) -> None:
        """Everything is as declared on return. Raises BusError."""
        await ensure_topology(self._bus, self._settings)
        self._bus.on_reconnect(self._restore)

    async def run(self) -> None:
        """Looks now and then, until cancelled: nobody tells when a stream is deleted."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            await self._bus.wait_connected()
            try:
                await self._restore()
            except BusError as error:
                logger.warning("cannot look whether all streams are there: %s", error)

    async def _restore(self) -> None:
        try:
            restored = await restore_missing(self._bus, self._settings)
        except NotPermitted:
            logger.debug("streams are not ours to declare")
            return
        for line in restored:
            logger.warning("%s was missing and is declared again", line)
