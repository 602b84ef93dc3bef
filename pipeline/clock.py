"""The broker's time, for deadlines that every process must agree on.

Reads the time stamp in the broker's stream information; writes nothing. Promises: `now_ns` is the broker's time to within
half a round trip of the best sample, and is monotonic between two syncs; before the first sync it is this machine's time.
"""

import asyncio
import logging
import re
import time
from datetime import UTC, datetime
from typing import Protocol

from ..schemas import signals
from ..schemas.errors import BusError, BusRejected
from ..schemas.streams import REQUESTS
from . import instruments
from .connection import Bus
from .jetstream import api

logger = logging.getLogger(__name__)

SAMPLES = 5
SYNC_EVERY_S = 30.0

_TIMESTAMP = re.compile(r"^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)$")


class Clock(Protocol):
    """Whoever knows the time that deadlines are written in."""

    def now_ns(self) -> int: ...


class WallClock:
    """This machine's time: where a broker's time is not worth a question."""

    def now_ns(self) -> int:
        return time.time_ns()


class ServerClock:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._offset_ns = time.time_ns() - time.monotonic_ns()
        self._due = asyncio.Event()

    def now_ns(self) -> int:
        return time.monotonic_ns() + self._offset_ns

    def at_ns(self, monotonic_ns: int) -> int:
        """Server time when this machine's monotonic clock showed that; 0 stays 0, which is no time."""
        return monotonic_ns + self._offset_ns if monotonic_ns else 0

    async def sync(self) -> None:
        """Raises BusError when the broker does not answer; the old offset stays."""
        self._offset_ns = await server_time_offset_ns(self._bus)

    async def run(self) -> None:
        """Syncs every 30 seconds and after each reconnect, until cancelled."""
        remove = self._bus.on_reconnect(self._sync_soon)
        try:
            while True:
                try:
                    async with asyncio.timeout(SYNC_EVERY_S):
                        await self._due.wait()
                except TimeoutError:
                    pass  # the usual case: nothing happened for this long
                self._due.clear()
                await self._sync_or_keep()
        finally:
            remove()

    async def _sync_soon(self) -> None:
        self._due.set()

    async def _sync_or_keep(self) -> None:
        try:
            await self.sync()
        except BusError as error:
            logger.warning("server time not read, going on with the last offset: %s", error)


async def server_time_offset_ns(bus: Bus) -> int:
    """What to add to this machine's monotonic clock for the server's time. Raises BusError."""
    return min([await _sample(bus) for _ in range(SAMPLES)])[1]


async def _sample(bus: Bus) -> tuple[int, int]:
    """Round trip and offset. The answer is assumed to be written half-way."""
    sent = time.monotonic_ns()
    stamp = timestamp_ns(str((await api(bus, f"STREAM.INFO.{REQUESTS.name}")).get("ts", "")))
    received = time.monotonic_ns()
    instruments.record(signals.BUS_ROUND_TRIP, (received - sent) / 1e9)
    return received - sent, stamp - (sent + received) // 2


def timestamp_ns(text: str) -> int:
    """Nanoseconds since the epoch of an RFC 3339 time with up to nine digits of fraction."""
    match = _TIMESTAMP.match(text)
    if match is None:
        raise BusRejected(f"the broker's time {text!r} cannot be read")
    whole = datetime.fromisoformat(match[1] + match[3].replace("Z", "+00:00")).astimezone(UTC)
    return int(whole.timestamp()) * 1_000_000_000 + int((match[2] or "").ljust(9, "0"))
