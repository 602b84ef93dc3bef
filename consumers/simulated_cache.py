"""The KV cache of the simulated engine: who owns which block (`block_pool`) and what the blocks hold (the arena), kept in step.

A block holds the fingerprint of its token prefix in every word. Room is given in order of arrival; whoever waits is woken by
every change.
"""

import asyncio
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..schemas.blocks import block_count
from .block_pool import BlockPool, Cleared, PoolEvent, Removed, Stored
from .engine import BlockChange
from .simulated_model import TokenSequence


@dataclass
class SequenceBlocks:
    """The blocks of one sequence, in order; the first `hits` were in the cache already."""

    sequence: TokenSequence
    blocks: list[int] = field(default_factory=list[int])
    hits: int = 0


class Pulse:
    """Wakes everybody who waits for the next change."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    async def wait(self) -> None:
        await self._event.wait()

    def ring(self) -> None:
        self._event.set()
        self._event = asyncio.Event()


class SimulatedCache:
    def __init__(self, pool: BlockPool, arena: NDArray[np.uint64]) -> None:
        self.pool = pool
        self.changed = Pulse()
        self._arena = arena
        self._queue = asyncio.Lock()

    def used_fraction(self) -> float:
        return self.pool.used_blocks / self.pool.num_blocks

    async def allocate(self, owned: SequenceBlocks, timeout_s: float | None) -> None:
        """Blocks for the sequence so far. Raises TimeoutError. Pairs with `release`."""
        if not self._queue.locked() and self._take(owned):
            return
        async with asyncio.timeout(timeout_s), self._queue:
            while not self._take(owned):
                await self.changed.wait()

    def has_room(self, owned: SequenceBlocks) -> bool:
        """Whether every token so far has a place in a block, taking new blocks if there are any."""
        missing = block_count(owned.sequence.num_tokens, self.pool.block_size_tokens) - len(owned.blocks)
        return missing <= 0 or self.pool.grow(owned.blocks, missing)

    def release(self, blocks: list[int]) -> None:
        self.pool.release(blocks)
        self.changed.ring()

    def fill(self, owned: SequenceBlocks) -> None:
        """Write what the cache did not have, and make the full blocks findable."""
        fingerprints = owned.sequence.block_fingerprints()[owned.hits :]
        self._arena[owned.blocks[owned.hits :]] = np.array(fingerprints, dtype=np.uint64)[:, None]
        self.commit(owned)

    def wrong_blocks(self, owned: SequenceBlocks) -> list[int]:
        """The places in the sequence whose block does not hold, in every word, what it should."""
        expected = np.array(owned.sequence.block_fingerprints(), dtype=np.uint64)
        is_wrong = (self._arena[owned.blocks] != expected[:, None]).any(axis=1)
        return [int(index) for index in np.flatnonzero(is_wrong)]

    def commit(self, owned: SequenceBlocks) -> None:
        """Make the full blocks findable, now that they hold what they should."""
        sequence = owned.sequence
        self.pool.commit(owned.blocks, sequence.full_hashes, owned.hits, sequence.root)

    def store_last(self, owned: SequenceBlocks) -> None:
        """The newest token made its block full."""
        last = len(owned.sequence.full_hashes) - 1
        if last < len(owned.blocks):
            self._arena[owned.blocks[last]] = owned.sequence.full_hashes[last]
            self.pool.commit(owned.blocks, owned.sequence.full_hashes, last, owned.sequence.root)

    def _take(self, owned: SequenceBlocks) -> bool:
        allocation = self.pool.allocate(owned.sequence.num_tokens, owned.sequence.full_hashes)
        if allocation is None:
            return False
        owned.blocks, owned.hits = allocation.blocks, allocation.hits
        return True


def block_changes(pool: BlockPool) -> list[BlockChange]:
    """The pool's events since the last call, neighbours of one kind together."""
    taken = pool.take_events()
    if taken.lost:
        return [BlockChange("cleared"), BlockChange("stored", list(pool.cached_hashes()))]
    return [
        BlockChange(kind, [block for event in group if not isinstance(event, Cleared) for block in event.block_hashes])
        for kind, group in groupby(taken.events, _kind)
    ]


def _kind(event: PoolEvent) -> Literal["stored", "removed", "cleared"]:
    if isinstance(event, Stored):
        return "stored"
    return "removed" if isinstance(event, Removed) else "cleared"
