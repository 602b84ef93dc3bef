"""Who owns which KV block, and which blocks still hold a known prefix: pure bookkeeping, no bytes and no I/O.

A block is *blank* (free, nothing worth keeping), *idle* (free, but cached under its chained hash) or *used* (one or more owners).
Allocation takes blank blocks first, then the idle block that was released longest ago. A hit never covers the last token of
a prompt, because that one must be computed to draw from it. Every operation costs O(1) for each block it touches.
Block hashes are those of `schemas.blocks`; the order of reuse is vLLM's (a released chain loses its deepest block first).
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

MAX_UNTAKEN_BLOCKS = 100_000


@dataclass(frozen=True, slots=True)
class Allocation:
    """Blocks for one sequence, in order; the first `hits` of them were found in the cache, content and all."""

    blocks: list[int]
    hits: int


@dataclass(frozen=True, slots=True)
class Stored:
    """Neighbours in a chain, in its order; `parent_hash` is the one before the first."""

    block_hashes: Sequence[int]
    parent_hash: int


@dataclass(frozen=True, slots=True)
class Removed:
    block_hashes: Sequence[int]


@dataclass(frozen=True, slots=True)
class Cleared:
    pass


PoolEvent = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class PoolEvents:
    """What changed in the cache since the last look, in order. `lost`: some were dropped; only `cached_hashes()` tells the truth."""

    events: list[PoolEvent]
    lost: bool


class BlockPool:
    """Not for several threads. `record_events`: keep what `take_events` returns; off, nothing is kept."""

    def __init__(self, num_blocks: int, block_size_tokens: int, record_events: bool = False) -> None:
        self.num_blocks = num_blocks
        self.block_size_tokens = block_size_tokens
        self._owners = [0] * num_blocks
        self._hash_of: list[int | None] = [None] * num_blocks
        self._block_of: dict[int, int] = {}
        self._blank = list(range(num_blocks))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._record_events = record_events
        self._events: list[PoolEvent] = []
        self._events_lost = False
        self._untaken_blocks = 0

    @property
    def free_blocks(self) -> int:
        """Blank and idle: what an allocation can take."""
        return len(self._blank) + len(self._idle)

    @property
    def used_blocks(self) -> int:
        return self.num_blocks - self.free_blocks

    @property
    def cached_blocks(self) -> int:
        """Blocks that can be hit, whether or not somebody uses them."""
        return len(self._block_of)

    def match_prefix(self, hashes: Iterable[int]) -> list[int]:
        """The cached blocks of the longest known prefix. They are not owned by the asker, so they may go at the next allocation."""
        found = list[int]()
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def allocate(self, num_tokens: int, hashes: Sequence[int] = ()) -> Allocation | None:
        """Room for `num_tokens`, beginning with cached blocks where `hashes` (of the full blocks, in order) are known.

        None, and nothing changed, when there is not enough room. Pairs with `release`.
        """
        hits = self.match_prefix(hashes[: (num_tokens - 1) // self.block_size_tokens])
        missing = -(-num_tokens // self.block_size_tokens) - len(hits)
        idle_hits = sum(not self._owners[block] for block in hits)
        if missing > self.free_blocks - idle_hits:
            return None
        for block in hits:
            if not self._owners[block]:
                del self._idle[block]
            self._owners[block] += 1
        return Allocation(hits + self._take(missing), len(hits))

    def grow(self, blocks: list[int], count: int = 1) -> bool:
        """Append `count` new blocks to `blocks`; False, and nothing changed, when there is not enough room."""
        if count > self.free_blocks:
            return False
        blocks += self._take(count)
        return True

    def commit(self, blocks: Sequence[int], hashes: Sequence[int], start: int = 0, root: int = 0) -> None:
        """From place `start` on, these used blocks are full and hold the prefixes named by `hashes`, whose chain begins at `root`.

        A prefix that another block is cached for already stays with that block.
        """
        hash_of, block_of, owners = self._hash_of, self._block_of, self._owners
        fresh, fresh_from = list[int](), start
        for place in range(start, len(hashes)):
            block, block_hash = blocks[place], hashes[place]
            if not owners[block]:
                raise ValueError(f"block {block} is not in use")
            if block_hash in block_of or hash_of[block] is not None:
                if fresh:
                    self._note_stored(fresh, hashes[fresh_from - 1] if fresh_from else root)
                    fresh = []
                fresh_from = place + 1
                continue
            hash_of[block] = block_hash
            block_of[block_hash] = block
            fresh.append(block_hash)
        if fresh:
            self._note_stored(fresh, hashes[fresh_from - 1] if fresh_from else root)

    def release(self, blocks: Sequence[int]) -> None:
        """One owner lets go of each of these. The last owner's cached blocks stay hittable until their room is needed."""
        owners, hash_of, idle = self._owners, self._hash_of, self._idle
        for block in reversed(blocks):
            left = owners[block] - 1
            if left < 0:
                raise ValueError(f"block {block} is not in use")
            owners[block] = left
            if left:
                continue
            if hash_of[block] is None:
                self._blank.append(block)
            else:
                idle[block] = None

    def clear_cache(self) -> None:
        """Forget every cached prefix. Blocks in use stay in use."""
        for block in self._block_of.values():
            self._hash_of[block] = None
        self._block_of.clear()
        self._blank.extend(self._idle)
        self._idle.clear()
        if self._record_events:
            self._note(Cleared(), 1)

    def cached_hashes(self) -> Iterator[int]:
        return iter(self._block_of)

    def take_events(self) -> PoolEvents:
        taken = PoolEvents(self._events, self._events_lost)
        self._events, self._events_lost, self._untaken_blocks = [], False, 0
        return taken

    def _take(self, count: int) -> list[int]:
        """The caller has seen that there are enough."""
        split = max(len(self._blank) - count, 0)
        taken = self._blank[split:]
        del self._blank[split:]
        if len(taken) < count:
            hash_of, next_idle, gone = self._hash_of, self._idle.popitem, list[int]()
            while len(taken) < count:
                block, _ = next_idle(False)
                block_hash = hash_of[block]
                if block_hash is not None:
                    hash_of[block] = None
                    del self._block_of[block_hash]
                    gone.append(block_hash)
                taken.append(block)
            if self._record_events and gone:
                self._note(Removed(gone), len(gone))
        owners = self._owners
        for block in taken:
            owners[block] = 1
        return taken

    def _note_stored(self, block_hashes: Sequence[int], parent_hash: int) -> None:
        if self._record_events:
            self._note(Stored(block_hashes, parent_hash), len(block_hashes))

    def _note(self, event: PoolEvent, blocks: int) -> None:
        self._untaken_blocks += blocks
        if self._untaken_blocks > MAX_UNTAKEN_BLOCKS:
            self._events, self._events_lost, self._untaken_blocks = [], True, 0
            return
        self._events.append(event)
