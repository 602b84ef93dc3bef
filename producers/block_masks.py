"""KV blocks and who holds them: one dict entry for each distinct block, its hash and an int with one bit per holder.

The table under `prefix_index`. Bounded: over `max_blocks`, the blocks go that were least recently held (the order is exact within a
shard, and shards fill alike, since hashes are uniform). Bits of the dead are taken out of the masks in short steps. Pure.
"""

from collections.abc import Sequence

BLOCKS_PER_SHARD = 1200
SHARED_MASKS = 16_384
RETIRE_SHARE = 256  # each retired bit cleans one part in so many at once, so that no more than twice as many ever wait


class BlockMasks:
    """Many small dicts (`shards`, chosen by the low bits of the hash: `wrap`) instead of one large one, so that no growing, cleaning
    or search for the oldest entry takes long. Readers on the hot path index `shards` themselves.
    """

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self.blocks = 0
        self.evicted_blocks = 0
        shards = 1 << (max_blocks // BLOCKS_PER_SHARD).bit_length()
        self.shards: list[dict[int, int]] = [{} for _ in range(shards)]
        self.wrap = shards - 1
        self._shared: dict[int, int] = {}
        self._retired = 0
        self._cleaning = 0
        self._cleaned_shards = 0

    @property
    def unclean(self) -> int:
        """Bits that may still be in masks though nobody has them: not to be given to anybody."""
        return self._retired | self._cleaning

    def hold(self, bit: int, hashes: Sequence[int], refresh: bool = True) -> list[int]:
        """Sets `bit` of these blocks. Returns those that did not have it; they, and with `refresh` the others, are now the most
        recent, the first of the prompt last: leaves are evicted first.
        """
        shards, wrap, shared, room, fresh = self.shards, self.wrap, self._shared, self.max_blocks - self.blocks, list[int]()
        for block in hashes[::-1]:
            shard = shards[block & wrap]
            mask = shard.get(block, 0)
            if mask & bit:
                if refresh:
                    shard[block] = shard.pop(block)
                continue
            fresh.append(block)
            if mask:
                mask = shard.pop(block) | bit
                shard[block] = shared.setdefault(mask, mask)  # equal masks are one object: most blocks cost no mask
                continue
            shard[block] = bit
            if room:
                room -= 1
            else:  # the shard that grew makes room, so that all keep their share
                del shard[next(iter(shard))]
                self.evicted_blocks += 1
        self.blocks = self.max_blocks - room
        return fresh

    def drop(self, block: int, bits: int) -> None:
        """Unsets `bits` of a block, and forgets it when none is left."""
        shard = self.shards[block & self.wrap]
        mask = shard.get(block, 0)
        if not mask & bits:
            return
        left = mask & ~bits
        if left:
            shard[block] = self._shared.setdefault(left, left)
        else:
            del shard[block]
            self.blocks -= 1

    def retire(self, bit: int) -> None:
        """Its holder is gone: `bit` stays unclean until a pass of `clean` that began after this has ended."""
        self._retired |= bit
        self.clean(len(self.shards) // RETIRE_SHARE + 1)

    def clean(self, steps: int) -> None:
        """Takes unclean bits out of the next few shards. Every call that changes something does a step."""
        if len(self._shared) > SHARED_MASKS:
            self._shared.clear()
        while steps and self.unclean:
            if not self._cleaning:
                self._cleaning, self._retired, self._cleaned_shards = self._retired, 0, 0
            self._clean_shard(self._cleaned_shards)
            self._cleaned_shards += 1
            if self._cleaned_shards == len(self.shards):
                self._cleaning = 0
            steps -= 1

    def _clean_shard(self, index: int) -> None:
        shard, bits = self.shards[index], self._cleaning
        dirty = [block for block, mask in shard.items() if mask & bits]
        for block in dirty:
            self.drop(block, bits)
        if len(shard) < 2 * len(dirty):  # a dict gives no memory back by itself, but a copy of a sparse one is small
            self.shards[index] = dict(shard)
