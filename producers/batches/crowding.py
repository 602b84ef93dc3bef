"""Notices when batches crowd out the other requests of this process: they all share one event loop.

While requests of others are open, the loop is asked for a turn every `TICK_S`; where it comes late by more than `LATE_S`, the window of
batches shrinks. With nobody else to hold up, batches may fill the process.
"""

import asyncio
from collections.abc import Callable

from .window import Window

TICK_S = 0.02
LATE_S = 0.015
COOL_S = 0.5
"""Late turns within this time tell of the same crowd."""


async def make_way(window: Window, others: Callable[[], int]) -> None:
    """Until cancelled. `others`: open requests of this process that are not of batches."""
    clock = asyncio.get_running_loop().time
    while True:
        due_s = clock() + TICK_S
        await asyncio.sleep(TICK_S)
        if window.in_use and clock() - due_s > LATE_S and others() > 0:
            window.refused(COOL_S)
