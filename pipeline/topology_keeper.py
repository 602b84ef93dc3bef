"""Keeps the broker in its declared state while a process lives: what a restart, a lost store or an operator took away is declared again.

Reads and writes the JetStream API through `topology`. Promises: after each reconnect, and at most `LOOK_EVERY_S` after anything was
deleted, the streams, buckets and shared consumers are there; a stream in memory whose servers cannot agree on a leader is made anew
within a minute. How much of that a process does itself, `BrokerSettings.topology` says:
one whose user may not declare streams waits for those that may.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from ..schemas.errors import BusError, StreamMissing
from ..schemas.streams import ConsumerSpec
from .connection import Bus
from .patience import WAIT_S, when_ready
from .settings import TopologySettings
from .topology import (
    consumer_count,
    delete_stream_in_memory,
    ensure_topology,
    leaderless_in_memory,
    missing_streams,
    restore_missing,
)

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 2.0
LOOK_FOR_LEADERS_EVERY_S = 10.0
LEADERLESS_S = 30.0
"""Of an election that takes longer nothing comes: a server whose copy is empty or half waits for one that is whole, and there is none."""
SAY_EVERY_S = 10.0
_PAUSE_S = 0.25


def declaring(bus: Bus, spec: ConsumerSpec) -> Callable[[], Awaitable[None]] | None:
    """For a `Consumer` of one that is shared: what to do when it may be gone. A user that may not make it says so and waits for it."""
    if bus.settings.topology != "check":
        return None

    async def look() -> None:
        if await consumer_count(bus, spec) is None:
            logger.warning("consumer %s/%s is missing: `jetwake nats declare --model MODEL` makes it", spec.stream, spec.durable)

    return look


class TopologyKeeper:
    """`start` before anything else asks to be called after reconnects: the others need the streams."""

    def __init__(self, bus: Bus, settings: TopologySettings) -> None:
        self._bus = bus
        self._settings = settings
        self._does = bus.settings.topology
        self._leaders_looked_s = float("-inf")
        self._leaderless_since_s = dict[tuple[str, int], float]()

    async def start(self) -> None:
        """Everything is there on return, and as declared where that is ours to do. Raises BusError."""
        await when_ready(self._bus, self._declare)
        self._bus.on_reconnect(self._restore)

    async def _declare(self) -> None:
        if self._does == "declare":
            await ensure_topology(self._bus, self._settings)
        elif self._does == "restore":
            await restore_missing(self._bus, self._settings)
        else:
            await self._wait_until_declared()

    async def run(self) -> None:
        """Looks now and then, until cancelled: nobody tells when a stream is deleted."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            await self._bus.wait_connected()
            try:
                await self._restore()
                await self._replace_leaderless()
            except BusError as error:
                self._leaderless_since_s.clear()  # while the servers do not agree on anything, no stream of theirs is beyond help
                logger.warning("cannot look whether all streams are there: %s", error)

    async def _restore(self) -> None:
        if self._does == "check":
            return
        for line in await restore_missing(self._bus, self._settings):
            logger.warning("%s was missing and is declared again", line)

    async def _replace_leaderless(self) -> None:
        """When most servers that held a stream in memory were restarted at about the same time, the broker waits for ever for its content.

        Whoever uses one bears that it is gone: with a broker of one server each restart does that.
        """
        now_s = asyncio.get_running_loop().time()
        if self._does == "check" or self._settings.replicas == 1 or now_s - self._leaders_looked_s < LOOK_FOR_LEADERS_EVERY_S:
            return
        self._leaders_looked_s = now_s
        found = (await leaderless_in_memory(self._bus, self._settings)).items()
        self._leaderless_since_s = {one: self._leaderless_since_s.get(one, now_s) for one in found}
        for (name, _), since_s in self._leaderless_since_s.items():
            if now_s - since_s >= LEADERLESS_S:
                logger.warning("stream %s, in memory, has had no leader for %.0f s: it is made anew", name, now_s - since_s)
                await delete_stream_in_memory(self._bus, self._settings, name)
                await self._restore()

    async def _wait_until_declared(self) -> None:
        clock = asyncio.get_running_loop().time
        give_up_s, say_s = clock() + WAIT_S, clock() + 1.0
        while missing := await missing_streams(self._bus, self._settings):
            text = f"streams are missing: {', '.join(missing)}; `jetwake nats declare` makes them, and this user may not"
            if clock() >= give_up_s:
                raise StreamMissing(text)
            if clock() >= say_s:
                say_s = clock() + SAY_EVERY_S
                logger.warning("waiting, because %s", text)
            await asyncio.sleep(_PAUSE_S)
