"""The simulated engine's blocks that wait for a peer: kept by name until they are pulled, released or expired.

`run` looks for all of that, and after transfers that nobody waits for any more, while there is anything to look for.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from .kv_transfer_nixl import KvTransfer
from .simulated_cache import SimulatedCache

LOOK_AT_MOST_EVERY_S = 0.004
LOOK_AT_LEAST_EVERY_S = 0.016


@dataclass
class Lease:
    blocks: list[int]
    expires_at: float


class LeaseBook:
    """Times are those of the event loop."""

    def __init__(self, transfer: KvTransfer, cache: SimulatedCache, counters: Counter[str]) -> None:
        self._transfer = transfer
        self._cache = cache
        self._counters = counters
        self._leases: dict[str, Lease] = {}
        self._something = asyncio.Event()

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, name: str) -> bool:
        return name in self._leases

    def items(self) -> Iterator[tuple[str, Lease]]:
        return iter(self._leases.items())

    def add(self, name: str, blocks: list[int], expires_at: float) -> None:
        self._leases[name] = Lease(blocks, expires_at)
        self.look()

    def extend(self, name: str, expires_at: float) -> None:
        """To no earlier than this. Unknown names are ignored."""
        if lease := self._leases.get(name):
            lease.expires_at = max(lease.expires_at, expires_at)

    def end(self, name: str, counter: str) -> None:
        """Free the blocks. Unknown names are ignored."""
        if lease := self._leases.pop(name, None):
            self._counters[counter] += 1
            self._cache.release(lease.blocks)

    def settle(self) -> bool:
        """Free what was pulled, and what nobody pulled in time. Whether there was any."""
        before = len(self._leases)
        for note in self._transfer.poll_notifications():
            self.end(note.decode(errors="replace"), "leases_pulled")
        now = asyncio.get_running_loop().time()
        for name in [name for name, lease in self._leases.items() if lease.expires_at <= now]:
            self.end(name, "leases_expired")
        return len(self._leases) != before

    def look(self) -> None:
        """There is something to look for, from now on."""
        self._something.set()

    async def run(self) -> None:
        """Looks often while something happens, else now and then, until cancelled."""
        pause_s = LOOK_AT_MOST_EVERY_S
        while True:
            is_busy = self.settle()
            if not self._transfer.poll_unsettled() and not self._leases:
                self._something.clear()
                await self._something.wait()
                is_busy = True
            pause_s = LOOK_AT_MOST_EVERY_S if is_busy else min(pause_s * 2, LOOK_AT_LEAST_EVERY_S)
            await asyncio.sleep(pause_s)
