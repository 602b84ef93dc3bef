"""What a process needs at its start, asked of a cluster until it answers. Reads and writes what the caller does."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from ..schemas.errors import BrokerUnavailable
from .connection import Bus

logger = logging.getLogger(__name__)

T = TypeVar("T")

WAIT_S = 60.0
"""How long a process waits at its start for others: for a cluster that agrees on leaders, for somebody who declares streams."""
_PAUSE_S = 0.25


async def when_ready(bus: Bus, work: Callable[[], Awaitable[T]]) -> T:
    """Does `work`, again while a cluster that begins or has lost a server does not answer. Raises what `work` raises: BrokerUnavailable
    after `WAIT_S`, or at once where there is one server, which is then away."""
    clock = asyncio.get_running_loop().time
    give_up_s = clock() + WAIT_S
    while True:
        try:
            return await work()
        except BrokerUnavailable as error:
            if clock() >= give_up_s or not bus.is_clustered:
                raise
            logger.warning("the broker is not ready, trying again: %s", error)
        await asyncio.sleep(_PAUSE_S)
