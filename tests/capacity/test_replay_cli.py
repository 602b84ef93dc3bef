"""`jetwake replay` and `jetwake size` as scripts use them: keys, grids, pages, errors. The figures themselves are tested with the replay."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from traces import shared_prefixes, written
from typer.testing import CliRunner, Result

from jetwake.deploy.capacity.grid import FleetSize, GridOptions
from jetwake.deploy.capacity.profiles import profile_named
from jetwake.deploy.capacity.replay_many import replay_all
from jetwake.deploy.capacity.replay_settings import ReplaySettings
from jetwake.deploy.capacity.sizing import Limits, Sizing, candidates_of, size
from jetwake.deploy.capacity.sizing_report import recommendation
from jetwake.deploy.cli import app

KEYS = {"hit_rate", "ttft_ms", "itl_ms", "e2e_ms", "completed", "failed", "duration_s", "wall_s", "queue_depth", "transfer_ms"}


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(shared_prefixes(), tmp_path_factory.mktemp("traces"))


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def replayed(*arguments: object) -> list[dict[str, Any]]:
    result = run("replay", *arguments, "--json", "--jobs", 1)
    assert result.exit_code == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_one_configuration(trace_file: Path) -> None:
    [one] = replayed(
        trace_file, "--workers", 2, "--policy", "kv_aware", "--block-size", 64, "--blocks", 4096, "--profile", "dynamo-default"
    )
    assert one.keys() >= KEYS
    assert one["ttft_ms"].keys() == one["itl_ms"].keys() == one["e2e_ms"].keys() == {"mean", "p50", "p99"}
    assert (one["workers"], one["completed"], one["failed"]) == ({"aggregated": 2}, 60, 0)
    assert one["hit_rate"] == pytest.approx(56 * 1024 / (60 * 1200), abs=0.001)  # all but the first of each of 4 prefixes


def test_a_grid_has_every_fleet_with_every_policy(trace_file: Path) -> None:
    found = replayed(trace_file, "--workers", "1,2", "--split", "2:1", "--policy", "kv_aware,round_robin", "--blocks", "4096,512")
    asked = [(one["workers"], one["policy"], one["blocks"]) for one in found]
    fleets = ({"aggregated": 1}, {"aggregated": 2}, {"prefill": 2, "decode": 1})
    assert asked == [(fleet, policy, blocks) for fleet in fleets for blocks in (4096, 512) for policy in ("kv_aware", "round_robin")]
    assert all(one["transfer_ms"]["mean"] >= 0 for one in found)


def test_processes_give_the_same_figures(trace_file: Path) -> None:
    arguments = ("replay", trace_file, "--prefill", "1,2", "--decode", "2,1", "--json")
    alone, together = (
        [{**json.loads(line), "wall_s": 0} for line in run(*arguments, "--jobs", jobs).stdout.splitlines()] for jobs in (1, 2)
    )
    assert len(alone) == 2
    assert alone == together


def test_options_reach_the_replay(trace_file: Path) -> None:
    base = (trace_file, "--prefill", 1, "--decode", 1)
    [usual] = replayed(*base)
    [slow_link] = replayed(*base, "--link-gbytes-per-s", 0.5, "--link-latency-ms", 5, "--kv-bytes-per-token", 100_000)
    assert usual["transfer_ms"]["p99"] < 1
    assert slow_link["transfer_ms"]["p50"] == pytest.approx(5 + 176 * 100_000 / 0.5e9 * 1e3)  # 1,024 of the 1,200 tokens are there already
    [few] = replayed(*base, "--limit", 10, "--speedup", 4)
    assert few["completed"] == 10
    assert few["duration_s"] < 9 * 0.25 / 4 + 1
    [blind] = replayed(trace_file, "--workers", 3, "--knob", "overlap_weight=0")
    [seeing] = replayed(trace_file, "--workers", 3)
    assert blind["hit_rate"] < seeing["hit_rate"]
    assert (blind["knobs"], "knobs" in seeing, "link" in usual) == ({"overlap_weight": 0.0}, False, False)
    assert slow_link["link"] == {"gbytes_per_s": 0.5, "latency_ms": 5.0, "kv_bytes_per_token": 100_000, "domains": 1}
    [roofline] = replayed(trace_file, "--workers", 1, "--profile", "qwen3-8b@h100", "--blocks", "auto")
    assert roofline["blocks"] == profile_named("qwen3-8b@h100").kv_capacity_tokens // 64


def test_the_page_stands_alone_and_requests_are_recorded(trace_file: Path, tmp_path: Path) -> None:
    page, records = tmp_path / "out.html", tmp_path / "out.jsonl"
    fleets = ("--workers", 2, "--split", "1:1", "--link-gbytes-per-s", 1)
    result = run("replay", trace_file, *fleets, "--jobs", 1, "--report", page, "--requests", records)
    assert result.exit_code == 0, result.stderr
    assert "*" in result.stdout
    html = page.read_text()
    assert not re.search(r"(src|href)\s*=|url\(|@import|https?://", html)
    for words in ("Time to first token", "Inter-token latency", "Waiting, prefill", "Cache hits", "Link ", "Configuration", "1P + 1D"):
        assert words in html
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    assert len(lines) == 2 * 60
    assert {line["configuration"] for line in lines} == {"2 aggregated", "1P + 1D"}
    assert all(line["end_s"] > line["first_token_s"] > line["at_s"] for line in lines)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give --workers 8"),
        (("--workers", "0"), "from 1 up"),
        (("--workers", "two"), "'two'"),
        (("--prefill", "2", "--decode", "1,2"), "1 and 2 values"),
        (("--split", "3"), "6:2"),
        (("--workers", "1", "--policy", "magic"), "round_robin"),
        (("--workers", "1", "--blocks", "some"), "auto"),
        (("--workers", "1", "--blocks", "auto"), "dynamo-default does not know"),
        (("--workers", "1", "--profile", "warp"), "qwen3-32b@h100"),
        (("--workers", "1", "--knob", "overlap=1"), "overlap_weight"),
        (("--workers", "1", "--knob", "overlap_weight=much"), "a number"),
        (("--workers", "1", "--speedup", "0"), "above 0"),
        (("--workers", "1", "--block-size", "100"), "512"),
        (("--workers", "1", "--report", "/no/such/folder/x.html"), "/no/such/folder"),
    ],
)
def test_wrong_options_are_one_line(trace_file: Path, arguments: tuple[str, ...], said: str) -> None:
    result = run("replay", trace_file, *arguments, "--jobs", 1)
    assert result.exit_code == 2
    assert result.stderr.startswith("jetwake: ")
    assert result.stderr.count("\n") == 1
    assert said in result.stderr


def test_no_such_file() -> None:
    result = run("replay", "/no/such/trace.jsonl", "--workers", 1)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1


def sized(limits: Limits, blocks: int = 4096, **shape: Any) -> Sizing:
    """Four workers, for prompts that share nothing."""
    trace = shared_prefixes(**{"requests": 60, "prefixes": 1000, **shape})
    candidates = candidates_of(GridOptions(blocks=str(blocks)), [profile_named("dynamo-default")], 4, 0, "kv_aware")
    return size(trace, candidates, 4, limits, 0, 0.1, lambda traces, settings: replay_all(traces, settings, 1))


def test_prefills_and_answers_of_equal_weight_get_equal_pools() -> None:
    """Tokens must come every 8 ms, which a prefill between them breaks: a split wins. Too few of either pool, and that pool is what fails."""
    sizing = sized(Limits(0.3, 0.008), input_tokens=1500, output_tokens=20, gap_s=0.05)
    assert sizing.best.fleet == FleetSize(prefill=2, decode=2)
    assert sizing.best.carried is not None
    failed = {one.fleet: one.failed for one in sizing.candidates if one.failed}
    few_prefill, few_decode = failed[FleetSize(prefill=1, decode=3)], failed[FleetSize(prefill=3, decode=1)]
    assert few_prefill.ttft_share < 0.9 < few_prefill.itl_share
    assert few_decode.itl_share < 0.9 < few_decode.ttft_share
    assert all(one.carried is None or one.carried.speed < sizing.best.carried.speed for one in sizing.candidates[1:])


def test_long_answers_in_small_caches_want_every_worker_to_decode() -> None:
    sizing = sized(Limits(1.0, 0.015), blocks=512, input_tokens=1100, output_tokens=300, gap_s=0.3)
    assert sizing.best.fleet == FleetSize(aggregated=4)
    assert sizing.candidates[1].fleet == FleetSize(prefill=1, decode=3)
    assert "4 aggregated carries the most" in recommendation(sizing)[0]


def test_what_it_carries_was_replayed_and_the_next_rate_fails() -> None:
    best = sized(Limits(0.3, 0.008), input_tokens=1500, output_tokens=20, gap_s=0.05).best
    assert best.carried is not None
    assert best.failed is not None
    assert best.carried.share >= 0.9 > best.failed.share
    assert best.carried.rate_per_s < best.failed.rate_per_s <= best.carried.rate_per_s * 1.1 * 1.001
    trace = shared_prefixes(60, 0.05 / best.carried.speed, 1000, 1500, 20)
    [again] = replay_all([trace], [best.settings], 1)
    good = sum(record.ttft_s <= 0.3 and record.itl_s <= 0.008 for record in again.requests)
    assert good / 60 == pytest.approx(best.carried.share)


def test_limits_that_nobody_can_keep_are_said() -> None:
    sizing = sized(Limits(0.001, 0.001))
    assert sizing.best.carried is None
    assert "No fleet of 4 GPUs" in recommendation(sizing)[0]


def test_size_command(trace_file: Path, tmp_path: Path) -> None:
    asked = ("size", trace_file, "--gpus", 2, "--ttft-slo-ms", 500, "--itl-slo-ms", 50, "--slice", 30, "--jobs", 1, "--tolerance", 0.5)
    result = run(*asked, "--json", "--report", tmp_path / "size.html")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert {str(one["workers"]) for one in found["candidates"]} == {"{'aggregated': 2}", "{'prefill': 1, 'decode': 1}"}
    assert found["slice_requests"] == 30
    assert found["whole_trace"]["share"] <= 1
    assert "first 30 requests" in found["recommendation"]
    assert not re.search(r"(src|href)\s*=|https?://", (tmp_path / "size.html").read_text())
    wrong = run("size", trace_file, "--gpus", 1, "--ttft-slo-ms", 500, "--itl-slo-ms", 50, "--gpus-per-worker", 2)
    assert wrong.exit_code == 2
    assert "takes 2 GPUs, and there are 1" in wrong.stderr


def test_settings_of_a_grid_are_those_of_the_options() -> None:
    [one] = [
        candidate.settings for candidate in candidates_of(GridOptions(event_lag_ms=20, seed=3), [profile_named("zero")], 1, 0, "random")
    ]
    assert one == ReplaySettings(
        aggregated=1, policy="random", event_lag_s=0.02, seed=3, timing=profile_named("zero").timing, profile="zero"
    )
