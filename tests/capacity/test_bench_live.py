"""A trace sent to a running system: what comes back is what the trace asks for, and what a replay of the same says."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from fleet import fleet_of
from traces import shared_prefixes, written
from typer.testing import CliRunner, Result

from jetwake.consumers.timing import DYNAMO_DEFAULT
from jetwake.deploy.bench_live import Live, LiveBench, LivePlan, measure_live
from jetwake.deploy.capacity.live_prompts import live_prompts
from jetwake.deploy.capacity.profiles import profile_named
from jetwake.deploy.capacity.replay import replay
from jetwake.deploy.capacity.report import report_page
from jetwake.deploy.capacity.trace import Trace
from jetwake.deploy.cli import app
from jetwake.deploy.live_senders import LiveModel, OnTokens, Sent
from jetwake.deploy.nats_server import NatsServer
from jetwake.pipeline.settings import BrokerSettings
from jetwake.schemas.errors import RequestFailed, SetupError


def test_equal_content_is_equal_tokens_up_to_where_it_ends() -> None:
    trace = shared_prefixes(8, prefixes=4)
    prompts = live_prompts(trace, 1000, 10_000, 16)
    first, other, same = (prompts.prompt(trace.requests[place]) for place in (0, 1, 4))
    assert len(first) == 1200
    assert first[:1024] == same[:1024]
    assert first[1024:] != same[1024:]
    assert first[:512] != other[:512]
    assert max(first) < 1000


def test_lengths_are_scaled_to_what_the_model_takes() -> None:
    trace = shared_prefixes(8, prefixes=4)
    prompts = live_prompts(trace, 1000, 400, 16)
    scaled = prompts.scaled(trace)
    for request, before in zip(scaled.requests, trace.requests, strict=True):
        assert request.input_tokens + request.output_tokens <= 400
        assert request.input_tokens == pytest.approx(1200 * prompts.scale, abs=1)
        assert prompts.prompt(before) == prompts.prompt(before)
        assert len(request.content) == -(-request.input_tokens // scaled.stretch_tokens)
    assert scaled.stretch_tokens % 16 == 0
    first, same = prompts.prompt(trace.requests[0]), prompts.prompt(trace.requests[4])
    assert first[: 2 * scaled.stretch_tokens] == same[: 2 * scaled.stretch_tokens]
    with pytest.raises(SetupError, match="at most --scale 0"):
        live_prompts(trace, 1000, 400, 16, scale=0.5)


async def measured(url: str, model: str, trace: Trace) -> Live:
    parts = list[float]()
    live = await measure_live(trace, BrokerSettings(url=url), LivePlan(model=model), lambda _: None, parts.append)
    assert parts[-1] == 1
    return live


async def test_live_and_replay_fill_the_same_report(nats_server: NatsServer, unique: str) -> None:
    trace = shared_prefixes(30, gap_s=0.08, input_tokens=1100, output_tokens=6)
    async with fleet_of(nats_server.url, prefill=2, decode=1, model=unique, policy="kv_aware", timing=DYNAMO_DEFAULT, num_blocks=2048):
        live = await measured(nats_server.url, unique, trace)
    figures = live.result.figures()
    assert (figures["completed"], figures["failed"], figures["scale"]) == (30, 0, 1.0)
    assert all(record.output_tokens == 6 and record.first_token_s <= record.end_s for record in live.result.requests)
    assert live.result.token_gaps.count == 30 * 5
    assert {record.prefill_worker for record in live.result.requests} <= {"prefill-1", "prefill-2"}
    settings = live.settings(profile_named("dynamo-default"), "kv_aware")
    assert (settings.prefill, settings.decode, settings.blocks, settings.block_size_tokens) == (2, 1, 2048, 16)
    again = replay(live.trace, settings)
    assert figures["hit_rate"] == pytest.approx(again.figures()["hit_rate"], abs=0.25)
    assert {"prefill", "decode", "router"} <= live.result.series.queue_depth.keys()
    page = report_page("live", ["live", "replay"], [live.result, again])
    assert "Waiting, prefill" in page
    json.dumps(figures)


class Refusing:
    """Answers prompts of up to so many tokens, three tokens at a time."""

    model = LiveModel("m", 1000, 10_000, 16)

    def __init__(self, most_tokens: int) -> None:
        self.most_tokens = most_tokens

    async def send(self, prompt: Sequence[int], max_tokens: int, on_tokens: OnTokens) -> Sent:
        on_tokens(1)
        await asyncio.sleep(0)
        if len(prompt) > self.most_tokens:
            raise RequestFailed("too much for me", "engine_refused")
        on_tokens(3)
        return Sent(4, cached_tokens=len(prompt) // 2)


async def test_requests_that_fail_are_records_too() -> None:
    small, large = (
        shared_prefixes(5, gap_s=0.01, input_tokens=1100, output_tokens=4),
        shared_prefixes(1, input_tokens=1500, output_tokens=4),
    )
    trace = Trace("mixed", 512, (*small.requests, large.requests[0]))
    sender = Refusing(1200)
    bench = LiveBench(trace, sender, live_prompts(trace, 1000, 10_000, 16), lambda _: None)
    *good, bad = await bench.run()
    assert all(record.completed and record.cached_tokens == 550 for record in good)
    assert (bad.completed, bad.error) == (False, "failed: too much for me")
    assert bench.gaps.count == 5 * 3


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


async def test_command_compares_reality_with_a_replay(nats_server: NatsServer, unique: str, tmp_path: Path) -> None:
    path, page = written(shared_prefixes(8, gap_s=0.05, input_tokens=1100, output_tokens=3), tmp_path), tmp_path / "live.html"
    to = ("--nats-url", nats_server.url, "--model", unique, "--replay-profile", "dynamo-default", "--json", "--report", page)
    async with fleet_of(nats_server.url, aggregated=2, model=unique, max_model_len_tokens=600):
        result = await asyncio.to_thread(run, "bench", "live", "--trace", path, "--speedup", 2, *to)
    assert result.exit_code == 0, result.stderr
    live, replayed = (json.loads(line) for line in result.stdout.splitlines())
    assert (live["completed"], live["workers"]) == (8, {"aggregated": 2})
    assert (replayed["completed"], replayed["workers"]) == (8, {"aggregated": 2})
    assert live["scale"] < 0.6
    assert "lengths are multiplied by 0.5" in result.stderr
    assert "replay, dynamo-default" in page.read_text()


def test_command_without_an_endpoint(tmp_path: Path) -> None:
    path = written(shared_prefixes(3), tmp_path)
    result = run("bench", "live", "--trace", path, "--http", "http://127.0.0.1:9")
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "no OpenAI endpoint answers" in result.stderr
