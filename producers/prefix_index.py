"""Which worker holds which KV blocks: for a prompt's chained block hashes, how many leading blocks each lane has.

Fed by KV events, by snapshots and by what was just routed. Other models, LoRAs, salts and images have other root hashes
(`schemas.blocks`), so they never meet. Assumes prefix-closed caches: a chained hash names all its ancestors and engines evict leaves
first, so who holds a block holds those before it. `match` needs that to look at few blocks; it says what holes in a cache do.
Pure and synchronous: no I/O and no clock, times come in. A call's work is bounded by the blocks it is given, plus a short step of
cleaning and expiry; memory has a hard cap.
"""

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from .block_masks import BlockMasks

DEFAULT_PREDICTION_TTL_S = 10.0
EXPIRIES_PER_MATCH, EXPIRIES_PER_PREDICT = 512, 2048
CROWDED = 0.9


@dataclass(eq=False)
class _Lane:
    """`bit` is this lane's in every mask. `predicted`: blocks whose bit is a guess, and until when."""

    bit: int
    predicted: dict[int, float] = field(default_factory=dict[int, float])


@dataclass(frozen=True)
class _Prediction:
    """One routed request: true for those of `hashes` that nothing has confirmed, denied or predicted anew since."""

    expires_s: float
    lane: _Lane
    hashes: "array[int]"


class PrefixIndex:
    """A lane is one incarnation of a worker; `stored`, `replace` and `predict` make a lane known. Whoever reads events must drop
    late ones of an incarnation it has forgotten.

    `max_blocks` caps the distinct blocks; those least recently stored or routed to are evicted. `prediction_ttl_s` should exceed
    the time from routing to the worker's event, queueing included. `max_predicted_blocks` (else a quarter of `max_blocks`) caps
    predictions not yet expired; the oldest expire early. For engines without events, predictions are all there is: give them a time
    that is typical of the cache, and the whole cap.
    """

    def __init__(
        self, max_blocks: int, prediction_ttl_s: float = DEFAULT_PREDICTION_TTL_S, max_predicted_blocks: int | None = None
    ) -> None:
        self._masks = BlockMasks(max_blocks)
        self._prediction_ttl_s = prediction_ttl_s
        self._max_predicted_blocks = max_blocks // 4 if max_predicted_blocks is None else max_predicted_blocks
        self._lanes: dict[str, _Lane] = {}
        self._names: dict[int, str] = {}
        self._alive = 0
        self._predictions: deque[_Prediction] = deque()
        self._predicted_blocks = 0

    @property
    def lanes(self) -> tuple[str, ...]:
        return tuple(self._lanes)

    @property
    def blocks(self) -> int:
        """Distinct blocks in memory, those that only forgotten lanes held included until they are cleaned away."""
        return self._masks.blocks

    @property
    def predicted_blocks(self) -> int:
        """Blocks of predictions that have not expired."""
        return self._predicted_blocks

    @property
    def evicted_blocks(self) -> int:
        """How many blocks the cap has cost so far. More than a few: `max_blocks` is less than the fleet's caches hold."""
        return self._masks.evicted_blocks

    def stored(self, lane: str, hashes: Sequence[int]) -> None:
        """`lane` holds these blocks, in prompt order where they were stored together. Confirms predictions."""
        known = self._join(lane)
        if known.predicted:
            confirm = known.predicted.pop
            for block in hashes:
                confirm(block, None)
        self._masks.hold(known.bit, hashes)
        self._masks.clean(1)

    def removed(self, lane: str, hashes: Sequence[int]) -> None:
        """`lane` does not hold these blocks (any more). Denies predictions. Unknown blocks and lanes are fine."""
        known = self._lanes.get(lane)
        if known is not None:
            for block in hashes:
                known.predicted.pop(block, None)
                self._masks.drop(block, known.bit)
        self._masks.clean(1)

    def cleared(self, lane: str) -> None:
        """`lane` holds nothing, and predictions for it are void. Other lanes hold what they held."""
        if lane in self._lanes:
            self.forget(lane)
            self._join(lane)

    def replace(self, lane: str, hashes: Sequence[int]) -> None:
        """A snapshot: `lane` holds exactly these, and predictions for it are void. Further parts of a long snapshot: `stored`."""
        self.cleared(lane)
        self.stored(lane, hashes)

    def forget(self, lane: str) -> None:
        """The incarnation is dead: invisible at once; its memory comes back in steps, with later calls."""
        known = self._lanes.pop(lane, None)
        if known is not None:
            del self._names[known.bit]
            known.predicted.clear()
            self._alive ^= known.bit
            self._masks.retire(known.bit)

    def predict(self, lane: str, hashes: Sequence[int], now_s: float) -> None:
        """A request with these blocks goes to `lane`: they count as held there until the time is up, or an event says better."""
        self._expire(now_s, EXPIRIES_PER_PREDICT)
        known = self._join(lane)
        renewed = list(filter(known.predicted.__contains__, hashes)) if known.predicted else []
        # Engines say nothing when a cached block is used again: being routed to keeps it, once there is eviction to be kept from.
        crowded = self.blocks > CROWDED * self._masks.max_blocks
        guessed = renewed + self._masks.hold(known.bit, hashes, refresh=crowded)
        if guessed:
            expires_s = now_s + self._prediction_ttl_s
            known.predicted.update(dict.fromkeys(guessed, expires_s))
            self._predictions.append(_Prediction(expires_s, known, array("Q", guessed)))
            self._predicted_blocks += len(guessed)
            while self._predicted_blocks > self._max_predicted_blocks:
                self._expire_oldest()
        self._masks.clean(1)

    def match(self, hashes: Sequence[int], now_s: float) -> dict[str, int]:
        """For every lane that holds the first block: how many leading blocks it holds, really or by prediction.

        Looks at blocks 0, 1, 2, 4, 8, ... for all lanes at once, then bisects between the last that a lane holds and the first
        that it does not: about twice log2(depth) looks for each different depth. These blocks, the last one counted and the one
        after it are known for certain; a hole in a cache that covers none of the blocks looked at is counted as held.
        """
        self._expire(now_s, EXPIRIES_PER_MATCH)
        shards, wrap, names, matches = self._masks.shards, self._masks.wrap, self._names, dict[str, int]()
        ranges = self._ranges(hashes)
        while ranges:
            low, high, lanes = ranges.pop()
            while low < high:  # lanes hold block low - 1, and do not hold block high, if there is one
                middle = (low + high) >> 1
                block = hashes[middle]
                holding = shards[block & wrap].get(block, 0) & lanes
                if holding:
                    if holding != lanes:
                        ranges.append((low, middle, lanes ^ holding))
                        lanes = holding
                    low = middle + 1
                else:
                    high = middle
            while lanes:
                bit = lanes & -lanes
                matches[names[bit]] = low
                lanes ^= bit
        return matches

    def stored_depth(self, lane: str, hashes: Sequence[int], depth: int) -> int:
        """How many of the `depth` blocks that `match` found for `lane` are real; those after are predicted."""
        known = self._lanes.get(lane)
        if known is None or not known.predicted:
            return depth
        return next((index for index, block in enumerate(islice(hashes, depth)) if block in known.predicted), depth)

    def _ranges(self, hashes: Sequence[int]) -> list[tuple[int, int, int]]:
        """Lowest and highest possible depth, and the lanes for which this is so."""
        if not hashes:
            return []
        shards, wrap, ranges, spot, length = self._masks.shards, self._masks.wrap, list[tuple[int, int, int]](), 1, len(hashes)
        lanes = shards[hashes[0] & wrap].get(hashes[0], 0) & self._alive
        while lanes and spot < length:
            block = hashes[spot]
            holding = shards[block & wrap].get(block, 0) & lanes
            if holding != lanes:
                ranges.append((spot // 2 + 1, spot, lanes ^ holding))
                lanes = holding
            spot *= 2
        if lanes:
            ranges.append((spot // 2 + 1, length, lanes))
        return ranges

    def _join(self, lane: str) -> _Lane:
        known = self._lanes.get(lane)
        if known is None:
            used = self._alive | self._masks.unclean
            bit = ~used & (used + 1)  # the lowest free one
            known = self._lanes[lane] = _Lane(bit)
            self._names[bit] = lane
            self._alive |= bit
        return known

    def _expire(self, now_s: float, budget: int) -> None:
        """Ends predictions whose time is up, oldest first. After a burst, what exceeds `budget` blocks waits for the next call."""
        while self._predictions and self._predictions[0].expires_s <= now_s and budget > 0:
            budget -= self._expire_oldest()

    def _expire_oldest(self) -> int:
        """Returns the work it did, in blocks."""
        oldest = self._predictions.popleft()
        self._predicted_blocks -= len(oldest.hashes)
        predicted = oldest.lane.predicted
        if not predicted:  # all confirmed, or the lane is gone
            return 1
        for block in oldest.hashes:
            expires_s = predicted.get(block)
            if expires_s is not None and expires_s <= oldest.expires_s:
                del predicted[block]
                self._masks.drop(block, oldest.lane.bit)
        return len(oldest.hashes)
