"""The replay against cases computed by hand, and against laws that hold for every trace."""

import random
from dataclasses import asdict, dataclass, replace

import pytest

from jetwake.consumers.timing import DYNAMO_DEFAULT, Timing
from jetwake.deploy.capacity.replay import Link, ReplaySettings, _Replay, replay
from jetwake.deploy.capacity.replay_decode_time import decode_run
from jetwake.deploy.capacity.replay_links import Links
from jetwake.deploy.capacity.replay_result import ReplayResult
from jetwake.deploy.capacity.trace import Trace, TraceRequest
from jetwake.schemas.errors import SetupError

BLOCK = 16


@dataclass(frozen=True, slots=True)
class Plain(Timing):
    """Prefill: a millisecond for each new token. A decode step: 10 ms."""

    def prefill_s(self, new_tokens: int, context_tokens: int) -> float:
        return new_tokens / 1000

    def decode_step_s(self, batch: int, used_fraction: float, context_tokens: float) -> float:
        return 0.01


def settings(**changes: object) -> ReplaySettings:
    base = ReplaySettings(aggregated=1, policy="round_robin", block_size_tokens=BLOCK, blocks=64, timing=Plain())
    return replace(base, **changes)  # type: ignore[arg-type]


def split(**changes: object) -> ReplaySettings:
    return settings(**{"aggregated": 0, "prefill": 1, "decode": 1, **changes})


def trace(*requests: tuple[float, int, int, tuple[int, ...]]) -> Trace:
    """Time, prompt tokens, answer tokens, content."""
    return Trace("by hand", BLOCK, tuple(TraceRequest(*request) for request in requests))


def prompt(number: int, blocks: int) -> tuple[int, ...]:
    return tuple(range(1000 * number, 1000 * number + blocks))


def a_busy_trace(seed: int = 1, requests: int = 300, rate_per_s: float = 4.0) -> Trace:
    """Sessions whose prompts grow, in bursts."""
    dice, sessions, found, at_s = random.Random(seed), list[list[int]](), list[TraceRequest](), 0.0
    for number in range(requests):
        at_s += dice.expovariate(rate_per_s) if number % 4 == 0 else 0.0
        if not sessions or dice.random() < 0.3:
            sessions.append([dice.randrange(5), 10_000 * number])
        session = dice.choice(sessions[-12:])
        session += [10_000 * number + place for place in range(1, dice.randint(2, 12))]
        tokens = len(session) * BLOCK - dice.randrange(BLOCK)
        found.append(TraceRequest(round(at_s, 3), tokens, dice.randint(1, 40), tuple(session)))
    return Trace("busy", BLOCK, tuple(found))


FLEETS = {
    "aggregated": settings(aggregated=3, blocks=512, policy="kv_aware", timing=DYNAMO_DEFAULT),
    "crowded": settings(aggregated=2, blocks=70, policy="kv_aware", timing=DYNAMO_DEFAULT, max_sequences=8),
    "split": split(prefill=2, decode=2, blocks=512, policy="kv_aware", timing=DYNAMO_DEFAULT, link=Link(1e8, 0.002, 1000, domains=2)),
    "lagging": settings(aggregated=3, blocks=256, policy="kv_aware", timing=DYNAMO_DEFAULT, event_lag_s=0.2),
}


def fit(busy: Trace, blocks: int) -> Trace:
    return replace(busy, requests=tuple(one for one in busy.requests if one.input_tokens + one.output_tokens <= BLOCK * blocks))


def told(result: ReplayResult) -> dict[str, object]:
    return {**result.figures(), "wall_s": 0.0}


# -- by hand --------------------------------------------------------------------------------------------------------------


def test_one_request_alone() -> None:
    result = replay(trace((1.0, 40, 5, prompt(1, 3))), settings())
    [record] = result.requests
    assert record.ttft_s == pytest.approx(0.040 + 0.010)  # the step that ends the prompt decodes too
    assert record.end_s == pytest.approx(1.0 + 0.050 + 4 * 0.010)
    assert record.itl_s == pytest.approx(0.010)
    assert result.figures()["itl_ms"] == {"mean": 10.0, "p50": 10.0, "p99": 10.0}


def test_who_comes_in_mid_step_waits_for_its_end_and_shares_the_next_step() -> None:
    result = replay(trace((0.0, 32, 10, prompt(1, 2)), (0.047, 48, 2, prompt(2, 3))), settings())
    first, second = result.requests
    # The first has its first token at 42 ms. The step in flight at 47 ms ends at 52 ms, and the next takes 48 ms and a decode step.
    assert first.first_token_s == pytest.approx(0.042)
    assert second.first_token_s == pytest.approx(0.052 + 0.048 + 0.010)
    assert second.end_s == pytest.approx(0.110 + 0.010)
    assert first.end_s == pytest.approx(0.042 + 8 * 0.010 + 0.058)
    gaps_s, counts = result.token_gaps.weighted()
    assert sum(counts) == 9 + 1
    assert sum(gap * count for gap, count in zip(gaps_s, counts, strict=True)) == pytest.approx(first.end_s - 0.042 + 0.010)


def test_long_prompts_are_computed_in_chunks_and_decoding_goes_first() -> None:
    result = replay(trace((0.0, 16, 9, prompt(1, 1)), (0.0, 64, 2, prompt(2, 4))), settings(max_step_tokens=32))
    first, second = result.requests
    # 16 + 16 tokens, then 1 + 31, then 1 + 17: the last two steps decode as well.
    assert first.first_token_s == pytest.approx(0.032 + 0.010)
    assert second.first_token_s == pytest.approx(0.042 + 0.041 + 0.027)


def test_a_prompt_seen_before_costs_only_its_last_block() -> None:
    result = replay(trace((0.0, 64, 1, prompt(1, 4)), (1.0, 64, 1, prompt(1, 4))), settings())
    first, second = result.requests
    assert (first.cached_tokens, second.cached_tokens) == (0, 48)
    assert second.ttft_s == pytest.approx(0.016 + 0.010)
    assert result.figures()["hit_rate"] == 0.375


def test_prefill_and_decode_apart() -> None:
    link = Link(bytes_per_s=1000.0, latency_s=0.005, kv_bytes_per_token=1)
    result = replay(trace((0.0, 40, 4, prompt(1, 3))), split(link=link))
    [record] = result.requests
    assert record.first_token_s == pytest.approx(0.040)  # no decode step: the prefill worker draws it
    assert record.transfer_s == pytest.approx(0.005 + 0.040)
    assert record.second_token_s == pytest.approx(0.085 + 0.010)
    assert record.end_s == pytest.approx(0.085 + 3 * 0.010)
    assert (record.prefill_worker, record.decode_worker) == ("prefill-0", "decode-0")
    assert result.figures()["transfer_ms"]["mean"] == 45.0


def test_blocks_of_a_prefill_are_held_until_they_are_pulled() -> None:
    """Room for one prompt: the second is computed only when the first was pulled, at 40 + 40 ms."""
    link = Link(bytes_per_s=1000.0, kv_bytes_per_token=1)
    busy = trace((0.0, 40, 4, prompt(1, 3)), (0.0, 40, 4, prompt(2, 3)))
    _, second = replay(busy, split(blocks=5, decode_blocks=64, link=link)).requests
    assert second.first_token_s == pytest.approx(0.080 + 0.040)
    _, second = replay(busy, split(blocks=6, decode_blocks=64, link=link)).requests
    assert second.first_token_s == pytest.approx(0.080)


def test_a_handoff_waits_for_room_on_a_decode_worker() -> None:
    busy = trace((0.0, 40, 8, prompt(1, 3)), (0.0, 40, 8, prompt(2, 3)))
    first, second = replay(busy, split(prefill=2, blocks=64, decode_blocks=5)).requests
    assert (first.handoff_wait_s, second.handoff_wait_s) == (0.0, pytest.approx(first.end_s - 0.040))


def test_one_that_finds_no_block_for_its_next_token_makes_the_last_to_come_start_over() -> None:
    """Both prompts fill a block each; with three blocks, only one of them can go on."""
    result = replay(trace((0.0, 16, 4, prompt(1, 1)), (0.0, 16, 4, prompt(2, 1))), settings(blocks=3))
    first, second = result.requests
    assert result.preemptions == 1
    assert first.first_token_s == second.first_token_s == pytest.approx(0.042)
    assert first.end_s == pytest.approx(0.042 + 3 * 0.010)
    # Out at 42 ms, in again when the first has ended: its block is cached by then, but its last token must be computed.
    assert second.end_s == pytest.approx(first.end_s + 0.001 + 0.010 + 2 * 0.010)
    assert result.token_gaps.count == 3 + 3


def test_what_never_fits_fails_at_once_and_hurts_nobody() -> None:
    result = replay(trace((0.0, 60, 20, prompt(1, 4)), (0.0, 16, 2, prompt(2, 1))), settings(blocks=4))
    refused, served = result.requests
    assert "80 tokens do not fit: aggregated-0 has 4 blocks of 16" in refused.error
    assert served.completed
    assert (result.figures()["completed"], result.figures()["failed"]) == (1, 1)


# -- links ----------------------------------------------------------------------------------------------------------------


def test_transfers_share_a_link_and_domains_do_not() -> None:
    links = Links(Link(bytes_per_s=100.0, domains=2))
    links.start(1, "domain-0", "domain-0", 100.0, 0.0)
    links.start(2, "domain-0", "domain-0", 50.0, 0.5)  # the first has 50 bytes left: both end together, at half the speed
    links.start(3, "domain-1", "domain-1", 100.0, 0.0)
    links.start(4, "domain-0", "domain-1", 100.0, 0.25)
    ended = dict[int, float]()
    while links.next_end_s() < 100:
        now_s = links.next_end_s()
        ended |= dict.fromkeys(links.ended(now_s), now_s)
    assert ended == {1: 1.5, 2: 1.5, 3: 1.0, 4: 1.25}
    assert links.busy_s(1.5) == {"domain-0": 1.5, "domain-1": 1.0, "between": 1.0}


# -- laws -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FLEETS)
def test_the_same_seed_gives_the_same(name: str) -> None:
    busy = fit(a_busy_trace(), 60)
    first, second = replay(busy, FLEETS[name]), replay(busy, FLEETS[name])
    assert told(first) == told(second)
    assert [asdict(record) for record in first.requests] == [asdict(record) for record in second.requests]


@pytest.mark.parametrize("name", FLEETS)
def test_every_request_ends_once_and_gives_all_its_blocks_back(name: str) -> None:
    busy = fit(a_busy_trace(), 60)
    run = _Replay(busy, FLEETS[name], step_by_step=False)
    run.run(None)
    result = run.result()
    assert len(result.requests) == len(busy.requests)
    for record, request in zip(result.requests, busy.requests, strict=True):
        assert (record.at_s, record.input_tokens, record.output_tokens) == (request.at_s, request.input_tokens, request.output_tokens)
        assert record.completed
        assert record.at_s < record.first_token_s <= record.end_s
        assert (record.second_token_s > record.first_token_s) == (record.output_tokens > 1)
        assert 0 <= record.cached_tokens < record.input_tokens
    assert result.token_gaps.count == sum(request.output_tokens - 1 for request in busy.requests)
    assert [worker.engine.pool.used_blocks for worker in run._workers] == [0] * len(run._workers)
    assert all(depth.max > 0 or depth.mean == 0 for depth in result.queue_depth.values())
    assert sum(result.series.prompt_tokens) <= sum(request.input_tokens for request in busy.requests)


@pytest.mark.parametrize("name", FLEETS)
def test_many_steps_at_once_are_the_same_as_one_by_one(name: str) -> None:
    busy = fit(a_busy_trace(requests=120), 60)
    plain = replace(FLEETS[name], policy="round_robin")  # else routers hear more of workers that make more steps
    at_once, one_by_one = replay(busy, plain), replay(busy, plain, step_by_step=True)
    assert at_once.preemptions == one_by_one.preemptions
    for left, right in zip(at_once.requests, one_by_one.requests, strict=True):
        assert (left.prefill_worker, left.decode_worker, left.cached_tokens) == (
            right.prefill_worker,
            right.decode_worker,
            right.cached_tokens,
        )
        assert left.first_token_s == pytest.approx(right.first_token_s, rel=1e-9)
        assert left.end_s == pytest.approx(right.end_s, rel=1e-9)


def test_crowded_fleets_do_push_out() -> None:
    assert replay(fit(a_busy_trace(), 60), FLEETS["crowded"]).preemptions > 0


def test_a_run_of_steps_stops_at_a_bend_of_the_timing() -> None:
    run = decode_run(DYNAMO_DEFAULT, 10, 200, 0, 0, 1000)  # full from the 100th step on, where the polynomial is capped
    assert 1 < run.steps <= 100
    assert run.seconds(run.steps) == pytest.approx(sum(DYNAMO_DEFAULT.decode_step_s(10, step / 100) for step in range(run.steps)))


# -- what the router knows ------------------------------------------------------------------------------------------------


def test_kv_aware_finds_the_cache_and_predicts_it() -> None:
    turns = [(float(turn), 64 + 16 * turn, 2, prompt(1, 4 + turn)) for turn in range(6)]
    result = replay(trace(*turns), settings(aggregated=4, policy="kv_aware"))
    assert len({record.prefill_worker for record in result.requests}) == 1
    assert [record.cached_tokens for record in result.requests] == [0, *(64 + 16 * turn for turn in range(5))]
    assert [record.predicted_cached_tokens for record in result.requests] == [record.cached_tokens for record in result.requests]


def test_with_a_lag_the_router_believes_for_a_while_what_is_gone() -> None:
    """The second prompt evicts the first's blocks; the third comes before the router has heard of that."""
    busy = trace((0.0, 64, 1, prompt(1, 4)), (1.0, 64, 1, prompt(2, 4)), (1.2, 64, 1, prompt(1, 4)))
    at_once, late = (replay(busy, settings(policy="kv_aware", blocks=4, event_lag_s=lag_s)) for lag_s in (0.0, 0.5))
    assert [(record.predicted_cached_tokens, record.cached_tokens) for record in at_once.requests][2] == (0, 0)
    assert [(record.predicted_cached_tokens, record.cached_tokens) for record in late.requests][2] == (48, 0)


def test_a_short_prompt_is_not_sent_behind_a_long_one_when_it_can_wait_for_a_free_worker() -> None:
    """One worker, busy with 400 tokens in one step, and two more prompts: the short one goes first, and alone."""
    teach = [(float(number), 100 + number, 1, prompt(10 + number, 7)) for number in range(4)]
    burst = [(10.0, 400, 1, prompt(1, 25)), (10.01, 390, 1, prompt(2, 25)), (10.02, 16, 1, prompt(3, 1))]
    busy = trace(*teach, *burst, (10.03, 380, 1, prompt(4, 24)))
    _, long, short, _ = replay(busy, settings(policy="kv_aware", blocks=256)).requests[4:]
    assert short.first_token_s == pytest.approx(10.0 + 0.410 + 0.026)  # in the step after the one in flight
    assert long.first_token_s > short.first_token_s


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"aggregated": 0}, "at least 1 aggregated worker"),
        ({"prefill": 1, "decode": 1}, "not both"),
        ({"blocks": 0}, "blocks must be at least 1, not 0"),
        ({"policy": "best"}, "no routing policy is called 'best'"),
        ({"event_lag_s": -1.0}, "event_lag_s must be at least 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, object], words: str) -> None:
    with pytest.raises(SetupError, match=words):
        settings(**wrong)


def test_the_grain_of_the_trace_must_be_whole_blocks() -> None:
    with pytest.raises(SetupError, match="--block-size"):
        replay(trace((0.0, 40, 2, prompt(1, 3))), settings(block_size_tokens=10))
