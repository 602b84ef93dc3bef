from collections import Counter
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetwake.deploy.capacity.agent_workload import AgentRequest, AgentSettings, Skewed, agent_requests, parse_lengths
from jetwake.deploy.capacity.prefix_reuse import PrefixReuse
from jetwake.deploy.capacity.trace_generator import trace_of
from jetwake.schemas.errors import SetupError

SMALL = AgentSettings(requests=60, sessions=15, open_sessions=6, prefixes=4, prefix_tokens=(40, 120), user_tokens=(2, 9))

any_settings = st.builds(
    AgentSettings,
    requests=st.integers(1, 120),
    rate_per_s=st.floats(0.1, 100),
    sessions=st.integers(1, 50),
    open_sessions=st.integers(1, 20),
    prefixes=st.integers(1, 8),
    prefix_tokens=st.just((10, 30)),
    user_tokens=st.just((2, 9)),
    answer_tokens=st.just((1, 5)),
    burst_share=st.floats(0, 0.9),
    seed=st.integers(0, 1000),
)


def by_session(requests: list[AgentRequest]) -> dict[int, list[AgentRequest]]:
    sessions: dict[int, list[AgentRequest]] = {}
    for request in requests:
        sessions.setdefault(request.session, []).append(request)
    return sessions


def ideal_reuse(requests: list[AgentRequest], block_size_tokens: int) -> float:
    return PrefixReuse(trace_of(requests, "workload", block_size_tokens), block_size_tokens).ideal


@settings(max_examples=30, deadline=None)
@given(any_settings)
def test_the_same_settings_give_the_same_requests(given_settings: AgentSettings) -> None:
    first, second = list(agent_requests(given_settings)), list(agent_requests(given_settings))

    assert first == second
    assert first[-1].prompt() == second[-1].prompt()


def test_another_seed_gives_other_times_and_other_tokens() -> None:
    one, other = (next(agent_requests(replace(SMALL, seed=seed))) for seed in (1, 2))

    assert one.at_s != other.at_s
    assert one.prompt()[:20] != other.prompt()[:20]


@settings(max_examples=30, deadline=None)
@given(any_settings)
def test_requests_and_sessions_are_as_many_as_asked_and_come_in_order(given_settings: AgentSettings) -> None:
    requests = list(agent_requests(given_settings))
    sessions = by_session(requests)

    assert len(requests) == given_settings.requests
    assert len(sessions) == min(given_settings.sessions, given_settings.requests)
    assert all(one.at_s <= next_one.at_s for one, next_one in pairwise(requests))
    assert all([request.turn for request in turns] == list(range(len(turns))) for turns in sessions.values())


@settings(max_examples=30, deadline=None)
@given(any_settings)
def test_the_prompts_of_a_session_extend_each_other(given_settings: AgentSettings) -> None:
    for turns in by_session(list(agent_requests(given_settings))).values():
        for one, next_one in pairwise(turns):
            prompt, next_prompt = one.prompt(), next_one.prompt()
            assert len(prompt) == one.prompt_length_tokens
            assert next_prompt[: len(prompt)] == prompt
            assert len(next_prompt) > len(prompt) + one.max_tokens


def test_sessions_of_one_prefix_share_its_tokens_and_nothing_more() -> None:
    requests = [turns[0] for turns in by_session(list(agent_requests(SMALL))).values()]
    one, other = next((a, b) for a in requests for b in requests if a.prefix == b.prefix and a.session < b.session)
    length = one.segments[0].length_tokens

    assert one.prompt()[:length] == other.prompt()[:length]
    assert one.prompt()[length:] != other.prompt()[length:]


def test_lengths_are_in_their_ranges_and_tokens_in_the_vocabulary() -> None:
    requests = list(agent_requests(AgentSettings(vocabulary_size=1000)))
    prefix_lengths = {request.prefix: request.segments[0].length_tokens for request in requests}

    assert len(prefix_lengths) == 20
    assert all(4000 <= length <= 12_000 for length in prefix_lengths.values())
    assert all(8 <= request.max_tokens <= 24 for request in requests)
    assert 0 <= min(requests[0].prompt()) <= max(requests[0].prompt()) < 1000


@pytest.mark.parametrize("burst_share", [0.0, 0.2, 0.6])
def test_the_mean_rate_is_kept_with_and_without_bursts(burst_share: float) -> None:
    requests = list(agent_requests(AgentSettings(requests=20_000, sessions=15_000, burst_share=burst_share)))

    assert requests[-1].at_s == pytest.approx(20_000 / 12.0, rel=0.05)


def test_bursts_come_close_together_and_on_one_prefix() -> None:
    calm, bursty = (
        list(agent_requests(AgentSettings(requests=5000, sessions=1000, burst_share=burst_share))) for burst_share in (0.0, 0.5)
    )

    def share_of_close_pairs(requests: list[AgentRequest]) -> float:
        close = [one.prefix == other.prefix for one, other in pairwise(requests) if other.at_s - one.at_s <= 0.0101]
        return sum(close) / len(requests)

    assert share_of_close_pairs(bursty) > 0.2 > 5 * share_of_close_pairs(calm)


def test_a_session_rests_between_its_turns_while_others_can_be_opened() -> None:
    requests = list(agent_requests(AgentSettings()))
    last_opening_s = max(request.at_s for request in requests if request.turn == 0)
    early = by_session([request for request in requests if request.at_s <= last_opening_s]).values()

    assert min(other.at_s - one.at_s for turns in early for one, other in pairwise(turns)) >= 1.0


@settings(max_examples=20, deadline=None)
@given(any_settings)
def test_ideal_reuse_is_that_of_the_tokens_themselves(given_settings: AgentSettings) -> None:
    requests = list(agent_requests(replace(given_settings, requests=min(given_settings.requests, 20))))
    known, reused, total = set[tuple[int, ...]](), 0, 0
    for request in requests:
        prompt = tuple(request.prompt())
        reused += next((length for length in range(len(prompt) - 1, 0, -1) if prompt[:length] in known), 0)
        total += len(prompt)
        known.update(prompt[:length] for length in range(1, len(prompt) + 1))

    # What is equal by chance (a first token in 32,000) is no more than a token here and there.
    assert ideal_reuse(requests, 1) == pytest.approx(reused / total, abs=0.01)


def test_blocks_make_reuse_coarser() -> None:
    requests = list(agent_requests(SMALL))

    assert 0 < ideal_reuse(requests, 16) < ideal_reuse(requests, 1)
    assert ideal_reuse(requests, 1000) == 0


@pytest.mark.parametrize("wrong", [{"requests": 0}, {"rate_per_s": 0}, {"prefix_tokens": (9, 3)}, {"burst_share": 1.0}])
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(SetupError, match=next(iter(wrong))):
        AgentSettings(**wrong)


def test_skewed_lengths_have_the_median_and_mean_asked_for() -> None:
    lengths = parse_lengths("1-1000000:400:900", "--first-tokens")
    assert isinstance(lengths, Skewed)
    ordered = sorted(lengths.spread(20_000, Random(1)))

    assert ordered[10_000] == pytest.approx(400, rel=0.01)
    assert sum(ordered) / len(ordered) == pytest.approx(900, rel=0.03)
    assert parse_lengths("50-250", "") == (50, 250)
    assert parse_lengths("512", "") == (512, 512)


@pytest.mark.parametrize("wrong", ["", "a-b", "5-10:7", "5-10:9:8", "10-5:7:8"])
def test_lengths_that_make_no_sense_are_refused(wrong: str) -> None:
    with pytest.raises(SetupError):
        parse_lengths(wrong, "--first-tokens")


def test_popular_prefixes_are_taken_more_often() -> None:
    settings = AgentSettings(requests=5000, sessions=5000, prefixes=50, prefix_tokens=(10, 20), sharing=1.0, burst_share=0.0)
    counts = Counter(request.prefix for request in agent_requests(settings))

    assert counts[0] == pytest.approx(2 * counts[1], rel=0.2)
    assert counts[0] == pytest.approx(5000 / 4.499, rel=0.1)  # the 50th harmonic number
