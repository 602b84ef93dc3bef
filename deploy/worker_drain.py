"""How a worker leaves without a client noticing: nothing new is taken, what waits in its queue goes to others at once, what is in hand
may end for `grace_s`, and what then still runs, or waits here to be pulled, goes to others too.

Writes requests with the next attempt. None of this counts as a failure of a request.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..consumers.engine import Engine
from ..consumers.leases import HeldHandoffs
from ..pipeline.consume import Consumer, Delivery
from ..pipeline.topology import consumer_count
from ..schemas.errors import BusError, JetwakeError, WorkerLeaving
from ..schemas.prefill import PrefillJob
from .app import Pipe

log = logging.getLogger(__name__)

HAND_BACK_S = 5.0
"""How long giving work to others may take, after the grace."""
HAND_BACK_SLOTS = 64
LOOK_EVERY_S = 0.02


@dataclass(frozen=True)
class DrainOutcome:
    in_time: bool
    moved_requests: int
    took_s: float


class Stoppable(Protocol):
    async def stop(self, grace_s: float) -> None:
        """As `Consumer.stop`."""
        ...


class WorkerDrain:
    """`lane`: the worker's own queue; `consumers`: all it takes work from, that one included."""

    def __init__(
        self, pipe: Pipe, engine: Engine, held: HeldHandoffs, lane: Consumer[PrefillJob], consumers: Sequence[Stoppable], grace_s: float
    ) -> None:
        self._pipe = pipe
        self._engine = engine
        self._held = held
        self._lane = lane
        self._consumers = consumers
        self._grace_s = grace_s
        self._moved = self._moving = 0

    async def run(self) -> DrainOutcome:
        """The card says `draining` already."""
        started_s = time.monotonic()
        in_time = True
        queue = Consumer(
            self._pipe.bus,
            self._pipe.publisher,
            self._lane.spec,
            PrefillJob,
            self._hand_back,
            lambda: HAND_BACK_SLOTS - self._moving,
            self._fail,
            stage="drain",
            worker=self._lane.spec.durable,
            declare=_nothing,
        )
        async with asyncio.TaskGroup() as tasks:
            stops = [tasks.create_task(consumer.stop(self._grace_s + HAND_BACK_S)) for consumer in self._consumers]
            emptying = tasks.create_task(queue.run())
            try:
                async with asyncio.timeout(self._grace_s):
                    await asyncio.wait(stops)
                    await self._engine.drain()
            except TimeoutError:
                in_time = False
                await self._cut_short(stops)
            await self._wait_until_queue_is_empty()
            await queue.stop(HAND_BACK_S)
            await emptying
        return DrainOutcome(in_time, self._moved, time.monotonic() - started_s)

    async def _cut_short(self, stops: Sequence[asyncio.Task[None]]) -> None:
        error = WorkerLeaving(f"{self._lane.spec.durable} drains, and its grace of {self._grace_s:g} s is over")
        log.warning("%s", error)
        self._moved += len(self._pipe.in_flight)
        self._pipe.in_flight.leave(error)
        await asyncio.wait(stops)
        self._moved += await self._held.hand_back_all(error)

    async def _wait_until_queue_is_empty(self) -> None:
        """What a router sends after this, because it has not heard yet, is found by the sweep for queues without an owner."""
        try:
            async with asyncio.timeout(HAND_BACK_S):
                while self._moving or ((count := await consumer_count(self._pipe.bus, self._lane.spec)) and count.pending):
                    await asyncio.sleep(LOOK_EVERY_S)
        except (BusError, TimeoutError) as error:
            log.warning("%s leaves its queue to the routers: %s", self._lane.spec.durable, error or "no time left")

    async def _hand_back(self, delivery: Delivery[PrefillJob]) -> None:
        self._moving += 1
        try:
            error = WorkerLeaving(f"{self._lane.spec.durable} drains")
            await self._pipe.endings.again(delivery.message.request, error)
            self._moved += 1
        finally:
            self._moving -= 1

    async def _fail(self, delivery: Delivery[PrefillJob], error: JetwakeError) -> None:
        await self._pipe.endings.failed(delivery.message.request, error)


async def _nothing() -> None:
    """A queue that others took over is not taken back in order to leave it."""
