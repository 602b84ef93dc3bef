"""How long somebody who was refused should wait: from how long the request queue is and how fast it goes down.

Reads the state of `JW_REQUESTS`. Promises: an answer between `SHORTEST_S` and `LONGEST_S`, within about a fifth of a second, also when
the broker tells nothing.
"""

import asyncio
from dataclasses import dataclass

from ..pipeline.connection import Bus
from ..pipeline.topology import queue_progress
from ..schemas.errors import BusError
from ..schemas.streams import REQUESTS

SHORTEST_S, LONGEST_S = 1.0, 30.0
ROOM_SHARE = 0.1
"""What part of the queue should have gone before it is worth trying again."""
LOOK_APART_S = 0.1
LOOK_KEPT_S = 30.0


@dataclass(frozen=True)
class QueueLook:
    """At one moment: requests that wait, and requests that were ever taken off."""

    at_s: float
    waiting: int
    taken: int


class OverloadEstimate:
    """For one process: refusals that follow each other soon share an earlier look."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._earlier: QueueLook | None = None

    async def retry_after_s(self) -> float:
        try:
            now = await self._look()
            if self._earlier is None or now.at_s - self._earlier.at_s > LOOK_KEPT_S:
                self._earlier = now
                await asyncio.sleep(LOOK_APART_S)
                now = await self._look()
        except BusError:  # away, or not ours to ask
            return SHORTEST_S
        return retry_after_s(self._earlier, now)

    async def _look(self) -> QueueLook:
        waiting, taken = await queue_progress(self._bus, REQUESTS.name)
        return QueueLook(asyncio.get_running_loop().time(), waiting, taken)


def retry_after_s(earlier: QueueLook, now: QueueLook) -> float:
    """Until a tenth of what waits has gone, at the pace seen. Pure."""
    rate = (now.taken - earlier.taken) / max(now.at_s - earlier.at_s, 1e-3)
    if rate <= 0:
        return LONGEST_S if now.waiting else SHORTEST_S
    return min(LONGEST_S, max(SHORTEST_S, ROOM_SHARE * now.waiting / rate))
