"""The prefix index against a dict of sets, its promises about time, memory and dead lanes one by one, and what holes do."""

import sys
from collections.abc import Iterator, Sequence
from itertools import count, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from jetwake.producers.prefix_index import PrefixIndex
from jetwake.schemas.blocks import block_hashes, root_hash, unpack_hashes
from jetwake.schemas.tokens import pack_tokens

TTL_S = 10.0


def chain(tokens: Sequence[int], root: int = root_hash("m")) -> list[int]:
    return block_hashes(pack_tokens(tokens), 1, root)


def distinct_chains(blocks: int) -> Iterator[list[int]]:
    """Prompts that share nothing."""
    return (chain([number, *range(blocks - 1)]) for number in count())


def leading(held: set[int], hashes: Sequence[int]) -> int:
    return next((depth for depth, block in enumerate(hashes) if block not in held), len(hashes))


prompts = st.lists(st.integers(0, 1), max_size=12).map(chain)
lanes = st.sampled_from(["a", "b", "c", "d"])


class IndexAgainstModel(RuleBasedStateMachine):
    """The model: for each lane, what is stored as a set, and what is predicted with its time of expiry."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(3000, TTL_S)  # several shards, so that cleaning takes several calls
        self.now_s = 0.0
        self.stored: dict[str, set[int]] = {}
        self.predicted: dict[str, dict[int, float]] = {}
        self.asked = [chain([0] * 12), chain([1] * 12)]

    def _held(self, lane: str) -> set[int]:
        return self.stored[lane] | {block for block, expires_s in self.predicted[lane].items() if expires_s > self.now_s}

    def _join(self, lane: str) -> None:
        self.stored.setdefault(lane, set())
        self.predicted.setdefault(lane, {})

    @rule(lane=lanes, hashes=prompts)
    def store(self, lane: str, hashes: list[int]) -> None:
        self.index.stored(lane, hashes)
        self._join(lane)
        self.stored[lane].update(hashes)
        for block in hashes:
            self.predicted[lane].pop(block, None)
        self.asked.append(hashes)

    @rule(lane=lanes, hashes=prompts, keep=st.integers(0, 12))
    def remove_leaves(self, lane: str, hashes: list[int], keep: int) -> None:
        leaves = hashes[keep:]
        if lane in self.stored:
            others = [asked for asked in self.asked if leading(self._held(lane), asked) > keep]
            if any(asked[keep:] != leaves[: len(asked) - keep] for asked in others):
                return  # another branch, or a longer one, is held there: these are no leaves
            self.stored[lane].difference_update(leaves)
            for block in leaves:
                self.predicted[lane].pop(block, None)
        self.index.removed(lane, leaves[::-1])

    @rule(lane=lanes)
    def clear(self, lane: str) -> None:
        self.index.cleared(lane)
        if lane in self.stored:
            self.stored[lane], self.predicted[lane] = set(), {}

    @rule(lane=lanes, first=prompts, second=prompts)
    def replace(self, lane: str, first: list[int], second: list[int]) -> None:
        self.index.replace(lane, [*first, *second])
        self.stored[lane], self.predicted[lane] = {*first, *second}, {}
        self.asked += [first, second]

    @rule(lane=lanes)
    def forget(self, lane: str) -> None:
        self.index.forget(lane)
        self.stored.pop(lane, None)
        self.predicted.pop(lane, None)

    @rule(lane=lanes, hashes=prompts)
    def predict(self, lane: str, hashes: list[int]) -> None:
        self.index.predict(lane, hashes, self.now_s)
        self._join(lane)
        self.predicted[lane].update(dict.fromkeys(set(hashes) - self.stored[lane], self.now_s + TTL_S))
        self.asked.append(hashes)

    @rule(seconds=st.sampled_from([0.5, 4.0, TTL_S]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @invariant()
    def matches_are_those_of_the_model(self) -> None:
        assert sorted(self.index.lanes) == sorted(self.stored)
        for hashes in self.asked[-4:]:
            expected = {lane: leading(self._held(lane), hashes) for lane in self.stored}
            matches = self.index.match(hashes, self.now_s)
            assert matches == {lane: depth for lane, depth in expected.items() if depth}
            for lane, depth in matches.items():
                assert self.index.stored_depth(lane, hashes, depth) == leading(self.stored[lane], hashes[:depth])


TestIndexAgainstModel = IndexAgainstModel.TestCase
TestIndexAgainstModel.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (root_hash("m"), root_hash("other")),
        (root_hash("m"), root_hash("m", lora="a")),
        (root_hash("m", lora="a"), root_hash("m", lora="b")),
        (root_hash("m", salt="1"), root_hash("m", salt="2")),
        (root_hash("m", lora="x"), root_hash("m", salt="x")),
        (root_hash("m", multimodal_keys=["i1"]), root_hash("m", multimodal_keys=["i2"])),
    ],
)
def test_equal_tokens_with_another_root_never_match(left: int, right: int) -> None:
    index = PrefixIndex(1000)
    index.stored("a", chain(range(20), left))
    index.predict("b", chain(range(20), left), 0.0)
    assert index.match(chain(range(20), left), 0.0) == {"a": 20, "b": 20}
    assert index.match(chain(range(20), right), 0.0) == {}


def test_an_empty_prompt_matches_nothing_and_a_block_alone_matches() -> None:
    index = PrefixIndex(10)
    index.stored("a", chain([1]))
    assert index.match([], 0.0) == {}
    assert index.match(chain([1]), 0.0) == {"a": 1}


@given(depths=st.lists(st.integers(0, 700), min_size=1, max_size=100), length=st.integers(0, 600))
@settings(max_examples=50, deadline=None)
def test_more_lanes_than_a_machine_word_has_bits(depths: list[int], length: int) -> None:
    index, prompt = PrefixIndex(10_000), chain(range(700))
    for number, depth in enumerate(depths):
        index.stored(str(number), prompt[:depth])
    expected = {str(number): min(depth, length) for number, depth in enumerate(depths)}
    assert index.match(prompt[:length], 0.0) == {lane: depth for lane, depth in expected.items() if depth}


class CountingList(list[int]):
    looks = 0

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        self.looks += 1
        return super().__getitem__(index)


def test_looks_grow_with_the_logarithm_of_the_prompt_not_with_lanes() -> None:
    index, prompt = PrefixIndex(20_000), chain(range(8192))
    for number in range(128):
        index.stored(str(number), prompt[: 5000 if number % 2 else 100])
    counting = CountingList(prompt)
    assert set(index.match(counting, 0.0).values()) == {5000, 100}
    assert counting.looks < 50


@given(held=st.sets(st.integers(0, 40)), length=st.integers(1, 40))
def test_with_any_holes_the_ends_of_a_match_are_true(held: set[int], length: int) -> None:
    index, prompt = PrefixIndex(1000), chain(range(41))
    index.stored("a", [prompt[position] for position in held])
    depth = index.match(prompt[:length], 0.0).get("a", 0)
    assert (depth > 0) == (0 in held)
    if depth:
        assert depth - 1 in held
        assert depth == length or depth not in held


@pytest.mark.parametrize("hole", [range(1), range(1, 3), range(3, 5), range(100, 129), range(128, 130), range(200, 512)])
def test_a_hole_over_a_power_of_two_is_not_counted_past(hole: range) -> None:
    index, prompt = PrefixIndex(1000), chain(range(512))
    index.stored("a", prompt)
    index.removed("a", [prompt[position] for position in hole])
    assert index.match(prompt, 0.0).get("a", 0) == hole.start


def test_a_small_hole_elsewhere_is_counted_as_held() -> None:
    """The price of few looks: documented, and harmless for a decision."""
    index, prompt = PrefixIndex(1000), chain(range(512))
    index.stored("a", prompt)
    index.removed("a", prompt[70:75])
    assert index.match(prompt, 0.0) == {"a": 512}


def test_a_prediction_ends_when_its_time_is_up_and_not_before() -> None:
    index, prompt = PrefixIndex(1000, TTL_S), chain(range(8))
    index.predict("a", prompt, 0.0)
    index.predict("a", prompt[:3], 4.0)
    index.stored("a", prompt[:1])
    assert index.match(prompt, 9.99) == {"a": 8}
    assert index.match(prompt, 10.0) == {"a": 3}
    assert index.match(prompt, 14.0) == {"a": 1}
    assert (index.predicted_blocks, index.blocks) == (0, 1)


def test_a_denied_prediction_is_gone_and_may_be_made_again() -> None:
    index, prompt = PrefixIndex(1000, TTL_S), chain(range(8))
    index.predict("a", prompt, 0.0)
    index.removed("a", prompt[4:])
    assert index.match(prompt, 1.0) == {"a": 4}
    index.predict("a", prompt, 5.0)
    assert index.match(prompt, 12.0) == {"a": 8}
    assert index.match(prompt, 15.0) == {}


def test_what_is_stored_already_does_not_expire_with_a_prediction() -> None:
    index, prompt = PrefixIndex(1000, TTL_S), chain(range(8))
    index.stored("a", prompt[:5])
    index.predict("a", prompt, 0.0)
    assert index.stored_depth("a", prompt, 8) == 5
    assert index.match(prompt, TTL_S) == {"a": 5}


def test_predictions_have_a_cap_and_the_oldest_end_early() -> None:
    index = PrefixIndex(10_000, TTL_S, max_predicted_blocks=100)
    made = [prompt for prompt, _ in zip(distinct_chains(10), range(50), strict=False)]
    for prompt in made:
        index.predict("a", prompt, 0.0)
        assert index.predicted_blocks <= 100
    assert [bool(index.match(prompt, 0.0)) for prompt in made] == [False] * 40 + [True] * 10
    assert index.blocks == 100


def test_expiry_after_a_burst_is_spread_over_calls() -> None:
    index, asked = PrefixIndex(400_000, TTL_S), chain([7])
    for prompt, _ in zip(distinct_chains(500), range(100), strict=False):
        index.predict("a", prompt, 0.0)
    left = [index.predicted_blocks]
    while index.predicted_blocks:
        index.match(asked, TTL_S)
        left.append(index.predicted_blocks)
    assert left[0] == 50_000
    assert max(before - after for before, after in pairwise(left)) <= 1000
    assert index.blocks == 0


@pytest.mark.parametrize("max_blocks", [1, 7, 64, 5000])
def test_the_cap_holds_and_the_latest_stay(max_blocks: int) -> None:
    index = PrefixIndex(max_blocks)
    prompt: list[int] = []
    for prompt, _ in zip(distinct_chains(16), range(1000), strict=False):
        index.stored("a", prompt)
        assert index.blocks <= max_blocks
    assert index.blocks == min(max_blocks, 16_000)
    assert index.evicted_blocks == 16_000 - index.blocks
    assert index.match(prompt, 0.0) == {"a": min(16, max_blocks)}


def test_leaves_of_one_store_are_evicted_before_their_ancestors() -> None:
    index, prompt = PrefixIndex(10), chain(range(10))
    index.stored("a", prompt)
    index.stored("b", chain([99, 98, 97]))
    assert index.match(prompt, 0.0) == {"a": 7}


def test_a_prefix_that_requests_are_routed_to_outlives_one_that_is_not() -> None:
    """Engines send no event when a cached block is used again, so routing must keep it."""
    index, hot, cold = PrefixIndex(100), chain([1, *range(9)]), chain([2, *range(9)])
    index.stored("a", hot)
    index.stored("a", cold)
    for prompt, _ in zip(distinct_chains(10), range(100), strict=False):
        index.stored("b", [block ^ 1 for block in prompt])
        index.predict("a", hot, 0.0)
    assert index.match(hot, 0.0) == {"a": 10}
    assert index.match(cold, 0.0) == {}


def test_memory_stays_at_the_cap_whatever_is_streamed() -> None:
    index, sizes = PrefixIndex(20_000), list[int]()
    for number in range(300):
        data = b"".join(((number * 1000 + block) * 0x9E3779B97F4A7C15 % 2**64).to_bytes(8, "little") for block in range(1000))
        index.stored(str(number % 64), unpack_hashes(data))
        sizes.append(table_bytes(index))
        assert index.blocks <= 20_000
    assert max(sizes[200:]) <= 1.1 * max(sizes[100:200])


def table_bytes(index: PrefixIndex) -> int:
    """The dicts of the index and what they hold, as far as it can grow."""
    shards = index._masks.shards  # pyright: ignore[reportPrivateUsage]
    return sum(sys.getsizeof(shard) for shard in shards) + sum(map(sys.getsizeof, {id(m): m for s in shards for m in s.values()}.values()))


def test_a_forgotten_lane_is_invisible_at_once_and_its_memory_comes_back() -> None:
    index = PrefixIndex(50_000)
    made = [prompt for prompt, _ in zip(distinct_chains(100), range(400), strict=False)]
    for number, prompt in enumerate(made):
        index.stored("ab"[number % 2], prompt)
    full = table_bytes(index)
    index.forget("a")
    assert index.lanes == ("b",)
    assert [index.match(prompt, 0.0) for prompt in made] == [{}, {"b": 100}] * 200
    for _ in range(400):
        index.stored("b", [])
    assert index.blocks == 20_000
    assert table_bytes(index) < 0.75 * full


def test_an_incarnation_that_comes_again_starts_empty() -> None:
    index, prompt = PrefixIndex(100_000), chain(range(64))
    for number in range(2000):
        lane = f"w-{number}"
        index.stored(lane, prompt[: 1 + number % 64])
        index.predict(lane, prompt, float(number))
        assert index.match(prompt, float(number)) == {lane: 64}
        index.forget(lane)
        assert index.match(prompt, float(number)) == {}


@pytest.mark.parametrize("max_blocks", [1000, 1_000_000])
def test_thousands_of_lanes_come_and_go_and_masks_stay_short(max_blocks: int) -> None:
    index, prompt = PrefixIndex(max_blocks), chain(range(8))
    index.stored("stays", prompt)
    for number in range(3000):
        index.stored(f"w-{number}", prompt)
        if number >= 8:
            index.forget(f"w-{number - 8}")
    assert index.match(prompt, 0.0) == {"stays": 8, **{f"w-{number}": 8 for number in range(2992, 3000)}}
    widest = max(mask.bit_length() for shard in index._masks.shards for mask in shard.values())  # pyright: ignore[reportPrivateUsage]
    assert widest < 1024
    assert index.blocks == 8


def test_old_predictions_of_a_dead_lane_do_not_expire_for_the_one_that_follows_it() -> None:
    index, prompt = PrefixIndex(1000, TTL_S), chain(range(8))
    index.predict("old", prompt, 0.0)
    index.forget("old")
    for _ in range(10):  # until its bit may be given to another
        index.removed("old", [])
    index.stored("new", prompt)
    assert index.match(prompt, TTL_S) == {"new": 8}


def test_clearing_takes_effect_in_order_with_later_stores() -> None:
    index, prompt = PrefixIndex(1000), chain(range(8))
    index.stored("a", prompt)
    index.stored("b", prompt)
    index.predict("a", chain([9]), 0.0)
    index.cleared("a")
    index.stored("a", prompt[:2])
    assert index.match(prompt, 0.0) == {"a": 2, "b": 8}
    assert index.match(chain([9]), 0.0) == {}


def test_what_is_said_of_unknown_lanes_and_blocks_is_harmless() -> None:
    index = PrefixIndex(1000)
    index.removed("never", chain([1]))
    index.cleared("never")
    index.forget("never")
    assert index.lanes == ()
    index.stored("a", chain([1]))
    index.removed("a", chain([2, 3]))
    assert index.match(chain([1]), 0.0) == {"a": 1}
