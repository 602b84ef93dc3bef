"""How many lines of batches one process has on the way: as many as are taken, and no more than it may.

It begins small and doubles while nothing is refused; a refusal (or being in the way of others) halves it, and it grows slowly from there. Lines that wait in the queue
of the batch class hurt nobody, but each costs a little here.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

FIRST = 8.0


class Window:
    """Shared by all batches of a process."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.in_use = 0
        self._limit = min(FIRST, float(most))
        self._doubling = True
        self._halved_s = float("-inf")
        self._news = asyncio.Event()

    @property
    def limit(self) -> int:
        return max(1, int(self._limit))

    @asynccontextmanager
    async def place(self) -> AsyncGenerator[None]:
        """Waits for one, and keeps it."""
        while self.in_use >= self.limit:
            self._news.clear()
            await self._news.wait()
        self.in_use += 1
        try:
            yield
        finally:
            self.in_use -= 1
            self._news.set()

    def taken(self) -> None:
        """A line was served."""
        self._limit = min(self.most, self._limit + (1.0 if self._doubling else 1.0 / self._limit))
        self._news.set()

    def refused(self, wait_s: float) -> None:
        """One was turned away. Refusals within `wait_s` tell of the same overload."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._halved_s > wait_s:
            self._halved_s = now_s
            self._doubling = False
            self._limit = max(1.0, self._limit / 2)
