"""What must be done again after each reconnect, done until it succeeds.

Reads and writes nothing itself. Promises: callbacks run in order of registration; one that raises a JetwakeError is logged and
run again, later each time, without holding up the others; another reconnect begins anew. Any other exception is a bug and ends
`run`, for the owner to see.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from ..schemas.errors import JetwakeError
from .backoff import backoff_s

logger = logging.getLogger(__name__)

ReconnectCallback = Callable[[], Awaitable[None]]


class Reconnects:
    def __init__(self) -> None:
        self._callbacks: list[ReconnectCallback] = []
        self._reconnected = asyncio.Event()

    def add(self, callback: ReconnectCallback) -> Callable[[], None]:
        """Returns its removal."""
        self._callbacks.append(callback)
        return lambda: self._callbacks.remove(callback)

    def happened(self) -> None:
        self._reconnected.set()

    async def run(self) -> None:
        while True:
            await self._reconnected.wait()
            self._reconnected.clear()
            await self._run_callbacks(list(self._callbacks))

    async def _run_callbacks(self, waiting: list[ReconnectCallback]) -> None:
        failures = 0
        while waiting and not self._reconnected.is_set():  # after another reconnect all begin anew
            failed: list[ReconnectCallback] = []
            for callback in waiting:
                try:
                    await callback()
                except JetwakeError as error:
                    logger.warning("after a reconnect, %s: %s: %s", getattr(callback, "__qualname__", callback), error.code, error)
                    failed.append(callback)
            waiting = failed
            if waiting:
                failures += 1
                await asyncio.sleep(backoff_s(failures, 0.1))
