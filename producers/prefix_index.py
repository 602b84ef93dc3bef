"""Which worker holds which KV blocks: for a prompt's chained block hashes, how many leading blocks each lane has.

One dict entry per distinct block: its hash, and an int with one bit per lane that holds it (`schemas.blocks` makes the hashes; other
models, LoRAs, salts and images have other roots, so they never meet). Fed by KV events, snapshots and by what was just routed.
Assumes prefix-closed caches: a chained hash names all its ancestors and engines evict leaves first, so who holds a block holds the
blocks before it. `match` needs that to look at few blocks; where a cache has holes it may count past one (see there).
Pure and synchronous: no I/O and no clock; times come in. Every call does bounded work, and memory has a hard cap.
"""

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

DEFAULT_PREDICTION_TTL_S = 10.0
BLOCKS_PER_SHARD = 300
SHARED_MASKS = 16_384
EXPIRIES_PER_MATCH, EXPIRIES_PER_PREDICT = 512, 8192
CROWDED = 0.9
FORGET_SHARE = 256  # each forgotten lane cleans one part in so many of the index, so no more than about twice as many bits wait


@dataclass(eq=False)
class _Lane:
    """`bit` is this lane's in every mask. `predicted`: blocks whose bit is a guess, and until when."""

    bit: int
    predicted: dict[int, float] = field(default_factory=dict[int, float])


@dataclass(frozen=True)
class _Prediction:
    """One routed request. It holds for `hashes` that nothing has confirmed, denied or predicted anew since."""

    expires_s: float
    lane: _Lane
    hashes: "array[int]"


class PrefixIndex:
    """`max_blocks` bounds the distinct blocks; over it, those go that were least recently stored or routed to (approximately: the
    order is kept within each shard). `max_predicted_blocks` bounds the blocks of predictions not yet expired; over it, the oldest
    expire early. `prediction_ttl_s` should exceed the time from routing to the worker's event, queueing included.

    A lane is one incarnation of a worker. Every lane a call names becomes known by `stored`, `predict` and `replace`; whoever reads
    events must drop those of an incarnation it has forgotten.
    """

    def __init__(
        self, max_blocks: int, prediction_ttl_s: float = DEFAULT_PREDICTION_TTL_S, max_predicted_blocks: int | None = None
    ) -> None:
        self._max_blocks = max_blocks
        self._prediction_ttl_s = prediction_ttl_s
        self._max_predicted_blocks = max_blocks // 4 if max_predicted_blocks is None else max_predicted_blocks
        # Many small dicts instead of one: none is ever rebuilt, cleaned or searched for its oldest entry at a length that is felt.
        shards = 1 << max(0, max_blocks // BLOCKS_PER_SHARD).bit_length()
        self._shards: list[dict[int, int]] = [{} for _ in range(shards)]
        self._wrap = shards - 1
        self._blocks = 0
        self._evicted_blocks = 0
        self._masks: dict[int, int] = {}
        self._lanes: dict[str, _Lane] = {}
        self._names: dict[int, str] = {}
        self._alive = 0
        self._predictions: deque[_Prediction] = deque()
        self._predicted_blocks = 0
        self._retired = 0
        self._cleaning = 0
        self._cleaned_shards = 0

    @property
    def lanes(self) -> tuple[str, ...]:
        return tuple(self._lanes)

    @property
    def blocks(self) -> int:
        """Distinct blocks in memory, those that only forgotten lanes held included until they are cleaned away."""
        return self._blocks

    @property
    def predicted_blocks(self) -> int:
        """Blocks of predictions that have not expired."""
        return self._predicted_blocks

    @property
    def evicted_blocks(self) -> int:
        """How many blocks the cap has cost so far. More than a few: `max_blocks` is less than the fleet's caches hold."""
        return self._evicted_blocks

    def stored(self, lane: str, hashes: Sequence[int]) -> None:
        """`lane` holds these blocks, in prompt order where they were stored together. Confirms predictions."""
        known = self._join(lane)
        if known.predicted:
            forget_prediction = known.predicted.pop
            for block in hashes:
                forget_prediction(block, None)
        self._hold(known.bit, hashes)
        self._clean(1)

    def removed(self, lane: str, hashes: Sequence[int]) -> None:
        """`lane` does not hold these blocks (any more). Denies predictions. Unknown blocks and lanes are fine."""
        known = self._lanes.get(lane)
        if known is not None:
            for block in hashes:
                known.predicted.pop(block, None)
                self._drop(block, known.bit)
        self._clean(1)

    def cleared(self, lane: str) -> None:
        """`lane` holds nothing, other lanes what they held: as `replace` with nothing."""
        if lane in self._lanes:
            self._retire(lane)
            self._join(lane)

    def replace(self, lane: str, hashes: Sequence[int]) -> None:
        """A snapshot: `lane` holds exactly these, and predictions for it are void. Further parts of a long snapshot: `stored`."""
        self.cleared(lane)
        self.stored(lane, hashes)

    def forget(self, lane: str) -> None:
        """The incarnation is dead: invisible at once, its memory comes back in steps with later calls."""
        if lane in self._lanes:
            self._retire(lane)

    def predict(self, lane: str, hashes: Sequence[int], now_s: float) -> None:
        """A request with these blocks goes to `lane`: they count as held there until the time is up, or an event says better."""
        self._expire(now_s, EXPIRIES_PER_PREDICT)
        known = self._join(lane)
        bit, predicted, shards, wrap = known.bit, known.predicted, self._shards, self._wrap
        guessed = [block for block in hashes if block in predicted or not shards[block & wrap].get(block, 0) & bit]
        # Engines say nothing when a cached block is used again: being routed to keeps it, once there is eviction to be kept from.
        self._hold(bit, hashes if self._blocks > CROWDED * self._max_blocks else guessed)
        if guessed:
            expires_s = now_s + self._prediction_ttl_s
            predicted.update(dict.fromkeys(guessed, expires_s))
            self._predictions.append(_Prediction(expires_s, known, array("Q", guessed)))
            self._predicted_blocks += len(guessed)
            while self._predicted_blocks > self._max_predicted_blocks:
                self._expire_oldest()
        self._clean(1)

    def match(self, hashes: Sequence[int], now_s: float) -> dict[str, int]:
        """For every lane that holds the first block: how many leading blocks it holds, really or by prediction.

        Looks at blocks 0, 1, 2, 4, 8, ... for all lanes at once, then bisects between the last that a lane holds and the first
        that it does not: about twice log2(depth) looks for each different depth. These blocks, the last one counted and the one
        after it are known for certain; a hole in a cache that covers none of the blocks looked at is counted as held.
        """
        self._expire(now_s, EXPIRIES_PER_MATCH)
        shards, wrap, names, matches = self._shards, self._wrap, self._names, dict[str, int]()
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
        shards, wrap, ranges, spot, length = self._shards, self._wrap, list[tuple[int, int, int]](), 1, len(hashes)
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

    def _hold(self, bit: int, hashes: Sequence[int]) -> None:
        """Sets `bit` of these blocks and makes them the most recent, the first of the prompt last: leaves are evicted first."""
        shards, wrap, masks, room = self._shards, self._wrap, self._masks, self._max_blocks - self._blocks
        for block in hashes[::-1]:
            shard = shards[block & wrap]
            mask = shard.pop(block, 0)
            if mask & bit:
                shard[block] = mask
            elif mask:
                mask |= bit
                shard[block] = masks.setdefault(mask, mask)  # equal masks are one object
            else:
                shard[block] = bit
                if room:
                    room -= 1
                else:  # the shard that grew makes room, so that all keep their share
                    del shard[next(iter(shard))]
                    self._evicted_blocks += 1
        self._blocks = self._max_blocks - room
        if len(masks) > SHARED_MASKS:
            masks.clear()

    def _drop(self, block: int, bits: int) -> None:
        shard = self._shards[block & self._wrap]
        mask = shard.get(block, 0)
        if not mask & bits:
            return
        left = mask & ~bits
        if left:
            shard[block] = self._masks.setdefault(left, left)
        else:
            del shard[block]
            self._blocks -= 1

    def _join(self, lane: str) -> _Lane:
        known = self._lanes.get(lane)
        if known is None:
            used = self._alive | self._retired | self._cleaning
            bit = ~used & (used + 1)
            known = self._lanes[lane] = _Lane(bit)
            self._names[bit] = lane
            self._alive |= bit
        return known

    def _retire(self, lane: str) -> None:
        """Takes the lane's bit out of every answer; it is given to nobody before it is out of every mask."""
        known = self._lanes.pop(lane)
        del self._names[known.bit]
        known.predicted.clear()
        self._alive ^= known.bit
        self._retired |= known.bit
        self._clean(len(self._shards) // FORGET_SHARE + 1)

    def _clean(self, shards: int) -> None:
        """Takes retired bits out of the next few shards. A pass over all frees the bits that were retired when it began."""
        while shards and (self._cleaning or self._retired):
            if not self._cleaning:
                self._cleaning, self._retired, self._cleaned_shards = self._retired, 0, 0
            self._clean_shard(self._cleaned_shards)
            self._cleaned_shards += 1
            if self._cleaned_shards == len(self._shards):
                self._cleaning = 0
            shards -= 1

    def _clean_shard(self, index: int) -> None:
        shard, bits = self._shards[index], self._cleaning
        dirty = [block for block, mask in shard.items() if mask & bits]
        for block in dirty:
            self._drop(block, bits)
        if len(shard) < len(dirty):  # a dict does not give memory back by itself
            self._shards[index] = dict(shard.items())

    def _expire(self, now_s: float, budget: int) -> None:
        """Ends predictions whose time is up, oldest first; after a burst more than `budget` blocks of them wait for the next call."""
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
                self._drop(block, oldest.lane.bit)
        return len(oldest.hashes)
