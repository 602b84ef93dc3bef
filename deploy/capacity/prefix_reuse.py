"""How much of the prompts of a trace has been seen before: by an endless cache, and by one LRU cache of every size at once. Pure.

The cache is one pool for everybody, filled in the order of the trace: what a router could reach if it made of its fleet's caches one.
Like the block pool, it finds the longest known prefix of each prompt, never covers the last token, and lets the deepest blocks of a
prompt go first. One pass gives all sizes: a block is hit exactly by caches larger than the blocks touched since its last use (its
stack distance; Mattson, Gecsei, Slutz, Traiger, "Evaluation techniques for storage hierarchies", IBM Systems Journal, 1970).
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ...schemas.errors import SetupError
from .trace import Trace


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A stretch of prompts that stands in `requests` of them. `tokens`: from the prompt's start to its end, in whole blocks.

    `saved_tokens`: what an endless cache saves by it, without what a shorter shared prefix before it saves already.
    """

    requests: int
    tokens: int
    saved_tokens: int


class PrefixReuse:
    """`known_tokens`: for each request, what an endless cache would have had of it."""

    def __init__(self, trace: Trace, block_size_tokens: int) -> None:
        if block_size_tokens < 1 or trace.stretch_tokens % block_size_tokens:
            raise SetupError(f"--block-size must divide {trace.stretch_tokens}, the grain of {trace.name}; {block_size_tokens} does not")
        self.block_size_tokens = block_size_tokens
        self.input_tokens = sum(request.input_tokens for request in trace.requests)
        tree, runs = _Tree(), list[tuple[int, int]]()
        touched = _Touched(len(trace.requests))
        blocks_per_stretch = trace.stretch_tokens // block_size_tokens
        known_tokens = list[int]()
        for number, request in enumerate(trace.requests):
            full, usable = request.input_tokens // block_size_tokens, (request.input_tokens - 1) // block_size_tokens
            path = tree.path(request.content, request.input_tokens % trace.stretch_tokens)
            known_blocks = 0
            moved = list[tuple[int, int]]()
            for place, node in enumerate(path):
                last = tree.last[node]
                tree.requests[node] += 1
                tree.last[node] = number
                tree.end_blocks[node] = end_blocks = min((place + 1) * blocks_per_stretch, full)
                if last >= 0:
                    known_blocks = end_blocks
                    if moved and moved[-1][0] == last:
                        moved[-1] = (last, end_blocks)
                    else:
                        moved.append((last, end_blocks))
            runs += [(distance, min(count, usable - start)) for start, count, distance in touched.move(number, full, moved)]
            known_tokens.append(min(known_blocks, usable) * block_size_tokens)
        self.known_tokens: Sequence[int] = known_tokens
        self.distinct_blocks = touched.total
        self._tree = tree
        self._curve = _HitCurve(runs)

    @property
    def ideal(self) -> float:
        """The part of all prompt tokens that an endless cache would have had."""
        return sum(self.known_tokens) / self.input_tokens

    def pooled(self, blocks: int) -> float:
        """The same for one LRU cache of so many blocks."""
        return self._curve.hits(blocks) * self.block_size_tokens / self.input_tokens

    def shared_prefixes(self, most: int) -> list[SharedPrefix]:
        """Those that save most, in that order."""
        tree, size = self._tree, self.block_size_tokens
        found = list[SharedPrefix]()
        start_blocks, goes_on = [0] * len(tree.parent), [False] * len(tree.parent)
        for node, parent in enumerate(tree.parent):
            if parent < 0:
                continue
            same = tree.requests[parent] == tree.requests[node]
            goes_on[parent] |= same
            start_blocks[node] = start_blocks[parent] if same else tree.end_blocks[parent]
        for node, requests in enumerate(tree.requests):
            own_blocks = tree.end_blocks[node] - start_blocks[node]
            if requests > 1 and own_blocks and not goes_on[node]:
                found.append(SharedPrefix(requests, tree.end_blocks[node] * size, (requests - 1) * own_blocks * size))
        return sorted(found, key=lambda prefix: -prefix.saved_tokens)[:most]


class _Tree:
    """All prompts as one tree of their content; a node for each stretch that stands behind the same stretches, parents first."""

    def __init__(self) -> None:
        self.parent = list[int]()
        self.requests = list[int]()
        self.last = list[int]()
        self.end_blocks = list[int]()
        self._nodes: dict[tuple[int, int, int], int] = {}

    def path(self, content: Sequence[int], tail_tokens: int) -> list[int]:
        """The nodes of a prompt, new ones made. A last stretch that is not full is only like one of the same length: its id says so too."""
        path, parent, nodes = list[int](), -1, self._nodes
        for place, one in enumerate(content, 1 - len(content)):
            key = (parent, one, 0 if place else tail_tokens)
            node = nodes.get(key, -1)
            if node < 0:
                node = nodes[key] = len(self.parent)
                self.parent.append(parent)
                self.requests.append(0)
                self.last.append(-1)
                self.end_blocks.append(0)
            path.append(node)
            parent = node
        return path


class _Touched:
    """For each request so far, the blocks it was the last to touch: always the deeper end of its prompt. Sums in O(log n)."""

    def __init__(self, requests: int) -> None:
        self.total = 0
        self._first_block = [0] * requests
        self._sums = [0] * (requests + 1)

    def move(self, number: int, full: int, moved: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
        """Request `number` of `full` blocks touches, as `moved` says, the blocks last touched by some request up to some block.

        Returns, for each of these: its first block, the count, and the distance of the first, as they were before.
        """
        found = list[tuple[int, int, int]]()
        for last, end_block in moved:
            start = self._first_block[last]
            if end_block > start:
                found.append((start, end_block - start, self.total - self._up_to(last)))
        for (last, end_block), count in zip(moved, (max(0, end - self._first_block[last]) for last, end in moved), strict=True):
            self._first_block[last] = max(self._first_block[last], end_block)
            self._add(last, -count)
        self._add(number, full)
        return found

    def _up_to(self, number: int) -> int:
        total, place = 0, number + 1
        while place:
            total += self._sums[place]
            place &= place - 1
        return total

    def _add(self, number: int, count: int) -> None:
        self.total += count
        place = number + 1
        while place < len(self._sums):
            self._sums[place] += count
            place += place & -place


class _HitCurve:
    """From runs of blocks (the distance of the first, the count, each next one block further) to hits by cache size."""

    def __init__(self, runs: Sequence[tuple[int, int]]) -> None:
        slopes = dict[int, int]()
        for distance, count in runs:
            if count > 0:
                slopes[distance] = slopes.get(distance, 0) + 1
                slopes[distance + count] = slopes.get(distance + count, 0) - 1
        self._sizes = sorted(slopes)
        self._slopes = list(accumulate(slopes[size] for size in self._sizes))
        gains = (slope * (there - here) for slope, here, there in zip(self._slopes, self._sizes, self._sizes[1:], strict=False))
        self._hits = [0, *accumulate(gains)]

    def hits(self, blocks: int) -> int:
        place = bisect_right(self._sizes, blocks) - 1
        return self._hits[place] + self._slopes[place] * (blocks - self._sizes[place]) if place >= 0 else 0
