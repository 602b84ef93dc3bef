"""Keeps batches from crowding out the other requests of this process: they all share one event loop.

Long work on many lines lets go of the loop every `SLICE_S`, and for twice as long: a request needs several turns until it is accepted,
and would wait for a slice in each of them. While requests of others are open, the loop is asked for a turn every `TICK_S`; where it comes late by more than `LATE_S`, the window of
batches shrinks. With nobody else to hold up, batches may fill the process.
"""

import asyncio
import time
from collections.abc import Callable

from .window import Window

TICK_S = 0.02
LATE_S = 0.015
COOL_S = 0.5
"""Late turns within this time tell of the same crowd."""
SLICE_S = 0.002


async def make_way(window: Window, others: Callable[[], int]) -> None:
    """Until cancelled. `others`: open requests of this process that are not of batches."""
    clock = asyncio.get_running_loop().time
    while True:
        due_s = clock() + TICK_S
        await asyncio.sleep(TICK_S)
        if window.in_use and clock() - due_s > LATE_S and others() > 0:
            window.refused(COOL_S)


class Slices:
    """For a loop over many lines: `pause` after each. `rest_s`: 0 where the process has nothing else to do."""

    def __init__(self, rest_s: float = 2 * SLICE_S) -> None:
        self._rest_s = rest_s
        self._until_s = time.perf_counter() + SLICE_S

    async def pause(self) -> None:
        if time.perf_counter() >= self._until_s:
            await asyncio.sleep(self._rest_s)
            self._until_s = time.perf_counter() + SLICE_S
