import json
from pathlib import Path

from typer.testing import CliRunner

from jetwake.deploy.cli import app


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["trace", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_a_trace_is_generated_and_told(tmp_path: Path) -> None:
    file, report = str(tmp_path / "agents.jsonl.gz"), tmp_path / "out.html"
    code, _, told = run("generate", "-o", file, "--requests", "200", "--rate", "5", "--prefixes", "3", "--prefix-tokens", "1000-2000")
    assert (code, "200 requests" in told) == (0, True)

    code, out, _ = run("stats", file, "--json", "--cache-blocks", "10,100000", "--report", str(report))
    stats = json.loads(out)
    assert (code, stats["requests"], [size["blocks"] for size in stats["pooled_reuse"]]) == (0, 200, [10, 100_000])
    assert 0 < stats["pooled_reuse"][0]["reuse"] < stats["pooled_reuse"][1]["reuse"] == stats["ideal_reuse"]
    assert report.read_text().startswith("<!doctype html>")

    code, out, _ = run("stats", file, "--limit", "50")
    assert (code, "50 requests" in out, "shared prefixes" in out) == (0, True, True)


def test_what_is_wrong_is_one_line(tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"timestamp": 1}\n')
    for arguments in (["stats", str(broken)], ["stats", str(broken), "--cache-blocks", "x"], ["generate", "-o", "x", "--preset", "y"]):
        code, out, told = run(*arguments)
        assert (code, out, told.count("\n")) == (2, "", 1)
        assert told.startswith("jetwake: ")


def test_conversations_without_times_take_the_arrivals_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "chats.json"
    file.write_text(json.dumps([{"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "yes"}]}] * 300))
    code, out, _ = run("stats", str(file), "--arrivals", "10", "--json")
    stats = json.loads(out)

    assert (code, stats["requests"], len(stats["notes"])) == (0, 300, 2)
    assert 7 < stats["rate_per_s"] < 14
