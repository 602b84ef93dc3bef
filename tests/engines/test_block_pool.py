"""The block pool against a plain reference model, and its rules one by one."""

from collections import Counter, OrderedDict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jetwake.consumers.block_pool import BlockPool, Cleared, Removed, Stored
from jetwake.schemas.blocks import block_hashes

BLOCKS, SIZE = 8, 2


class PoolAgainstModel(RuleBasedStateMachine):
    """The model: who owns what as lists, what is cached as an ordered dict (least lately released first) plus those in use."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS, SIZE, record_events=True)
        self.owned: list[tuple[list[int], list[int]]] = []
        self.cached: dict[int, int] = {}
        self.idle: OrderedDict[int, int] = OrderedDict()
        self.told: set[int] = set()

    def _forget_reused(self, blocks: list[int]) -> None:
        for block_hash, block in list(self.cached.items()):
            if block in blocks:
                del self.cached[block_hash]
                self.idle.pop(block_hash, None)

    @rule(tokens=st.binary(min_size=1, max_size=10))
    def allocate(self, tokens: bytes) -> None:
        words = b"".join(bytes([b % 3, 0, 0, 0]) for b in tokens)
        hashes = block_hashes(words, SIZE, 0)
        expected_hits = 0
        for block_hash in hashes[: (len(tokens) - 1) // SIZE]:
            if block_hash not in self.cached:
                break
            expected_hits += 1
        missing = -(-len(tokens) // SIZE) - expected_hits
        used = {block for blocks, _ in self.owned for block in blocks}
        pinned = {self.cached[h] for h in hashes[:expected_hits]}
        allocation = self.pool.allocate(len(tokens), hashes)
        if missing > BLOCKS - len(used | pinned):
            assert allocation is None
            return
        assert allocation is not None
        assert allocation.hits == expected_hits
        assert allocation.blocks[:expected_hits] == [self.cached[h] for h in hashes[:expected_hits]]
        fresh = allocation.blocks[expected_hits:]
        assert len(set(fresh)) == len(fresh)
        assert not set(fresh) & (used | pinned)
        self._expect_least_lately_released(fresh, used | pinned)
        for block_hash in hashes[:expected_hits]:
            self.idle.pop(block_hash, None)
        self._forget_reused(fresh)
        self.owned.append((allocation.blocks, hashes))

    def _expect_least_lately_released(self, fresh: list[int], used: set[int]) -> None:
        blank = BLOCKS - len(used) - len([h for h, b in self.idle.items() if b not in used])
        evicted = [h for h, b in self.idle.items() if b in fresh]
        in_order = [h for h, b in self.idle.items() if b not in used]
        assert evicted == in_order[: max(len(fresh) - blank, 0)]

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        blocks, hashes = data.draw(st.sampled_from(self.owned))
        self.pool.commit(blocks, hashes)
        for block, block_hash in zip(blocks, hashes, strict=False):
            if block_hash not in self.cached and block not in self.cached.values():
                self.cached[block_hash] = block

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks, _ = self.owned.pop(data.draw(st.integers(0, len(self.owned) - 1)))
        self.pool.release(blocks)
        still_used = {block for others, _ in self.owned for block in others}
        by_block = {block: block_hash for block_hash, block in self.cached.items()}
        for block in reversed(blocks):
            if block not in still_used and block in by_block:
                self.idle[by_block[block]] = block

    @precondition(lambda self: self.owned)
    @rule(data=st.data(), count=st.integers(1, 3))
    def grow(self, data: st.DataObject, count: int) -> None:
        place = data.draw(st.integers(0, len(self.owned) - 1))
        blocks, _ = self.owned[place]
        used = {block for others, _ in self.owned for block in others}
        grown = self.pool.grow(blocks, count)
        assert grown == (count <= BLOCKS - len(used))
        if grown:
            assert not set(blocks[-count:]) & used
            self._expect_least_lately_released(blocks[-count:], used)
            self._forget_reused(blocks[-count:])

    @rule()
    def clear(self) -> None:
        self.pool.clear_cache()
        self.cached.clear()
        self.idle.clear()

    @invariant()
    def counts_agree(self) -> None:
        used = {block for blocks, _ in self.owned for block in blocks}
        assert self.pool.used_blocks == len(used)
        assert self.pool.free_blocks + self.pool.used_blocks == BLOCKS
        assert self.pool.cached_blocks == len(self.cached)
        assert set(self.pool.cached_hashes()) == set(self.cached)

    @invariant()
    def no_block_has_more_owners_than_hits(self) -> None:
        """A block shared by several sequences was cached when the later ones came."""
        owners = Counter(block for blocks, _ in self.owned for block in blocks)
        assert all(len(set(blocks)) == len(blocks) for blocks, _ in self.owned)
        assert all(0 <= block < BLOCKS for block in owners)

    @invariant()
    def events_tell_the_cache(self) -> None:
        for event in self.pool.take_events().events:
            match event:
                case Stored(block_hashes, _):
                    assert self.told.isdisjoint(block_hashes)
                    self.told.update(block_hashes)
                case Removed(block_hashes):
                    assert self.told.issuperset(block_hashes)
                    self.told.difference_update(block_hashes)
                case Cleared():
                    self.told.clear()
        assert self.told == set(self.cached)


PoolAgainstModel.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPoolAgainstModel = PoolAgainstModel.TestCase


def test_the_last_token_is_never_a_hit() -> None:
    pool = BlockPool(8, 4)
    first = pool.allocate(8, [1, 2])
    assert first is not None
    pool.commit(first.blocks, [1, 2])
    again, longer = pool.allocate(8, [1, 2]), pool.allocate(9, [1, 2])
    assert again is not None
    assert longer is not None
    assert (again.hits, longer.hits) == (1, 2)


def test_the_deepest_block_of_a_chain_goes_first() -> None:
    pool = BlockPool(3, 4)
    chain = pool.allocate(12, [1, 2, 3])
    assert chain is not None
    pool.commit(chain.blocks, [1, 2, 3])
    pool.release(chain.blocks)
    assert pool.allocate(4) is not None
    assert list(pool.cached_hashes()) == [1, 2]


def test_hits_survive_the_allocation_that_hits_them() -> None:
    """Even when everything else must be evicted for it."""
    pool = BlockPool(4, 4)
    chain = pool.allocate(16, [1, 2, 3, 4])
    assert chain is not None
    pool.commit(chain.blocks, [1, 2, 3, 4])
    pool.release(chain.blocks)
    longer = pool.allocate(16, [1, 9, 8, 7])
    assert longer is not None
    assert (longer.hits, longer.blocks[0]) == (1, chain.blocks[0])
    assert sorted(longer.blocks) == [0, 1, 2, 3]


def test_what_is_not_used_is_neither_committed_nor_released() -> None:
    pool = BlockPool(2, 4)
    with pytest.raises(ValueError, match="not in use"):
        pool.commit([0], [1])
    with pytest.raises(ValueError, match="not in use"):
        pool.release([0])


def test_untaken_events_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jetwake.consumers.block_pool.MAX_UNTAKEN_BLOCKS", 3)
    pool = BlockPool(8, 1, record_events=True)
    chain = pool.allocate(6)
    assert chain is not None
    pool.commit(chain.blocks, [1, 2], 0, 9)
    pool.commit(chain.blocks, [1, 2, 3, 4], 2)
    pool.commit(chain.blocks, [1, 2, 3, 4, 5, 6], 4)
    taken = pool.take_events()
    assert (taken.lost, taken.events) == (True, [Stored([5, 6], 4)])
    assert not pool.take_events().lost
