from collections import Counter
from statistics import fmean, median

import pytest

from jetwake.deploy.capacity.agent_workload import AgentSettings, agent_requests
from jetwake.deploy.capacity.prefix_reuse import PrefixReuse
from jetwake.deploy.capacity.trace import Trace
from jetwake.deploy.capacity.trace_generator import generate_trace, trace_of, trace_settings
from jetwake.schemas.errors import SetupError


@pytest.fixture(scope="module")
def toolagent() -> Trace:
    return generate_trace(trace_settings("mooncake-toolagent"))


def test_the_preset_has_the_published_counts_and_lengths(toolagent: Trace) -> None:
    inputs = sorted(request.input_tokens for request in toolagent.requests)
    outputs = [request.output_tokens for request in toolagent.requests]

    assert len(inputs) == 23_608
    assert toolagent.requests[-1].at_s == pytest.approx(3537, rel=0.02)
    assert {request.at_s % 3 for request in toolagent.requests} == {0}
    assert fmean(inputs) == pytest.approx(8596, rel=0.02)
    assert fmean(outputs) == pytest.approx(182, rel=0.03)
    assert median(outputs) == pytest.approx(30, abs=8)
    for percent, published in ((50, 6345), (90, 16_794), (95, 26_081), (99, 61_600)):
        assert inputs[percent * len(inputs) // 100] == pytest.approx(published, rel=0.12)
    assert inputs[0] >= 800
    assert inputs[-1] == pytest.approx(125_546, rel=0.15)


def test_the_preset_shares_prefixes_as_published(toolagent: Trace) -> None:
    reuse = PrefixReuse(toolagent, 512)
    distinct = {content for request in toolagent.requests for content in request.content}
    all_blocks = sum(len(request.content) for request in toolagent.requests)
    beginnings = Counter(request.content[:2] for request in toolagent.requests)

    assert all_blocks == pytest.approx(409_600, rel=0.03)
    assert 1 - len(distinct) / all_blocks == pytest.approx(0.553, abs=0.03)
    assert reuse.ideal == pytest.approx(0.59, abs=0.02)
    assert [count for _, count in beginnings.most_common(2)] == [9203, 3449]
    assert len(beginnings) == pytest.approx(6554, rel=0.03)
    # Counted for caches of so much of all distinct blocks, relative to endless.
    for part, published in ((0.01, 0.346), (0.05, 0.449), (0.1, 0.508), (0.25, 0.551)):
        assert reuse.pooled(round(part * 183_300)) / reuse.ideal == pytest.approx(published / 0.5526, abs=0.05)
    longest = reuse.shared_prefixes(3)
    assert [(prefix.tokens, prefix.requests) for prefix in longest[:2]] == [(12 * 512, 9203), (5 * 512, 3449)]


def test_a_seed_gives_one_trace_and_another_seed_another() -> None:
    def made(seed: int) -> Trace:
        return generate_trace(trace_settings("agents", seed=seed))

    assert made(3) == made(3)
    assert made(3) != made(4)


def test_content_is_alike_where_the_tokens_are() -> None:
    workload = list(agent_requests(AgentSettings(requests=60, sessions=15, prefixes=4, prefix_tokens=(40, 120), user_tokens=(2, 9))))
    trace = trace_of(workload, "small", 16)
    ids = dict[tuple[int, ...], int]()
    for request, told in zip(workload, trace.requests, strict=True):
        prompt = request.prompt()
        assert (told.input_tokens, told.output_tokens, told.at_s) == (len(prompt), request.max_tokens, round(request.at_s, 6))
        assert len(told.content) == -(-len(prompt) // 16)
        for place in range(len(prompt) // 16):  # full stretches: one id for each beginning of a prompt, and one beginning for each id
            assert ids.setdefault(tuple(prompt[: 16 * (place + 1)]), told.content[place]) == told.content[place]
    assert len(set(ids.values())) == len(ids)


def test_a_preset_is_scaled_in_all_its_kinds() -> None:
    trace = generate_trace(trace_settings("mooncake-toolagent", requests=2361, rate_per_s=20.0))
    beginnings = Counter(request.content[:2] for request in trace.requests)

    assert len(trace.requests) == pytest.approx(2361, abs=2)
    assert trace.requests[-1].at_s == pytest.approx(2361 / 20, rel=0.15)
    assert beginnings.most_common(1)[0][1] == 920


def test_own_settings_are_for_a_preset_of_one_kind() -> None:
    trace = generate_trace(trace_settings("agents", requests=100, own={"prefixes": 1, "prefix_tokens": (640, 640), "burst_share": 0.0}))

    assert len({request.content[:10] for request in trace.requests}) == 1
    with pytest.raises(SetupError, match="--prefixes: only with --preset agents"):
        trace_settings("mooncake-toolagent", own={"prefixes": 1})
    with pytest.raises(SetupError, match="there are agents, mooncake-toolagent"):
        trace_settings("other")
