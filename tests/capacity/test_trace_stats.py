from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetwake.consumers.block_pool import BlockPool
from jetwake.deploy.capacity.agent_workload import AgentSettings, Skewed
from jetwake.deploy.capacity.prefix_reuse import PrefixReuse, SharedPrefix
from jetwake.deploy.capacity.trace import Trace, TraceRequest, prompt_hashes
from jetwake.deploy.capacity.trace_generator import TraceSettings, generate_trace
from jetwake.deploy.capacity.trace_stats import cache_sizes, trace_stats
from jetwake.deploy.capacity.trace_view import sparkline
from jetwake.schemas.errors import SetupError

TINY = Trace(
    "tiny",
    100,
    (
        TraceRequest(0.0, 250, 10, (1, 2, 3), "a"),  # blocks A B C D E (of 50)
        TraceRequest(1.0, 250, 20, (1, 2, 4), "b"),  # A B C D known; a new F
        TraceRequest(2.0, 100, 30, (5,), "c"),  # G H
        TraceRequest(63.0, 420, 40, (1, 2, 3, 6, 7), "a"),  # stretch 3 is full now, so only A B C D are known; I J K L
    ),
)


def test_a_tiny_trace_by_hand() -> None:
    reuse = PrefixReuse(TINY, 50)
    stats = trace_stats(TINY, reuse, [3, 4, 5, 7])

    assert (stats.requests, stats.duration_s, stats.rate_per_s, stats.peak_per_minute) == (4, 63.0, 0.0635, 3)
    assert stats.gap_cv == pytest.approx(((20**2 * 2 + 40**2) / 3) ** 0.5 / 21, abs=0.001)
    assert (stats.input_tokens.mean, stats.input_tokens.least, stats.input_tokens.most) == (255, 100, 420)
    assert (stats.sessions, stats.turns and stats.turns.most, stats.distinct_blocks) == (3, 2, 12)
    assert list(reuse.known_tokens) == [0, 200, 0, 200]
    assert stats.ideal_reuse == round(400 / 1020, 4)
    assert (stats.sharing_requests, stats.shared_tokens and stats.shared_tokens.mean) == (0.5, 200)
    # Second request: nothing came between. Fourth: A to D were used before G and H, F is the deepest of that prompt and goes first.
    hit_tokens = [3 * 50 + 50, 4 * 50 + 2 * 50, 4 * 50 + 3 * 50, 8 * 50]
    assert [size.reuse for size in stats.pooled_reuse] == [round(tokens / 1020, 4) for tokens in hit_tokens]
    assert stats.top_prefixes == (SharedPrefix(3, 200, 400),)


def test_the_last_token_of_a_prompt_is_never_known() -> None:
    twice = Trace("twice", 64, (TraceRequest(0, 128, 1, (1, 2)), TraceRequest(1, 128, 1, (1, 2))))

    assert list(PrefixReuse(twice, 64).known_tokens) == [0, 64]


def test_a_prefix_within_a_prefix_is_told_for_what_it_adds() -> None:
    contents = [(1, 2, 3), (1, 2, 4), (1, 5), (1, 6), (9,)]
    trace = Trace("nested", 10, tuple(TraceRequest(place, 10 * len(one) + 1, 1, (*one, 100 + place)) for place, one in enumerate(contents)))
    reuse = PrefixReuse(trace, 10)

    assert reuse.shared_prefixes(9) == [SharedPrefix(4, 10, 30), SharedPrefix(2, 20, 10)]
    assert sum(prefix.saved_tokens for prefix in reuse.shared_prefixes(9)) == sum(reuse.known_tokens)


prompts = st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(1, 4)), min_size=1, max_size=25)


@given(prompts, st.integers(1, 40))
@settings(max_examples=300, deadline=None)
def test_reuse_is_that_of_a_cache_that_is_filled_prompt_by_prompt(given_prompts: list[tuple[list[int], int]], blocks: int) -> None:
    requests = [
        TraceRequest(place, 4 * len(one) + 1 - last, 1, (*one[:-1], 10 + 4 * one[-1] + last))
        for place, (one, last) in enumerate(given_prompts)
    ]
    trace = Trace("random", 4, tuple(requests))
    cache, hit_tokens = OrderedDict[int, None](), 0
    for request, hashes in zip(requests, prompt_hashes(trace, 2), strict=True):
        known = 0
        while known < min(len(hashes), (request.input_tokens - 1) // 2) and hashes[known] in cache:
            known += 1
        hit_tokens += 2 * known
        for block_hash in reversed(hashes):
            cache[block_hash] = None
            cache.move_to_end(block_hash)
        while len(cache) > blocks:
            cache.popitem(last=False)

    assert PrefixReuse(trace, 2).pooled(blocks) == pytest.approx(hit_tokens / sum(request.input_tokens for request in requests))


@pytest.mark.parametrize("blocks", [300, 2000, 10_000])
def test_reuse_is_that_of_one_block_pool_for_all(blocks: int) -> None:
    kind = AgentSettings(requests=1500, sessions=600, prefix_tokens=(500, 4000), first_tokens=Skewed(300, 900, 10, 9000), sharing=0.8)
    trace = generate_trace(TraceSettings("agents", (kind,)))
    pool, hit_tokens = BlockPool(blocks, 64), 0
    for request, hashes in zip(trace.requests, prompt_hashes(trace, 64), strict=True):
        allocation = pool.allocate(request.input_tokens, hashes)
        assert allocation is not None
        hit_tokens += 64 * allocation.hits
        pool.commit(allocation.blocks, hashes)
        pool.release(allocation.blocks)
    reuse = PrefixReuse(trace, 64)

    assert 0.1 < reuse.pooled(blocks) <= reuse.ideal
    assert reuse.pooled(blocks) == pytest.approx(hit_tokens / reuse.input_tokens, abs=0.002)


def test_cache_sizes_end_where_more_would_not_help() -> None:
    reuse = PrefixReuse(TINY, 50)

    assert cache_sizes(reuse) == [1, 2, 4, 8]
    assert reuse.pooled(8) == reuse.ideal > reuse.pooled(4)


def test_a_trace_whose_requests_come_at_once_has_no_rate() -> None:
    trace = Trace("batch", 64, (TraceRequest(0, 10, 1, (1,)), TraceRequest(0, 10, 1, (2,))))
    stats = trace_stats(trace, PrefixReuse(trace, 64))

    assert (stats.rate_per_s, stats.gap_cv, stats.sessions, stats.shared_tokens) == (None, None, None, None)


def test_blocks_must_divide_the_grain() -> None:
    with pytest.raises(SetupError, match="--block-size must divide 100"):
        PrefixReuse(TINY, 64)


def test_sparklines_keep_the_shape() -> None:
    assert sparkline([0, 1, 4, 8]) == " ▁▄█"
    assert len(sparkline(range(1000))) == 60
