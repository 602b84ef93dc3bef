"""Replay a trace on a virtual clock: `replay`."""

from pathlib import Path
from typing import Annotated

import typer

from .common import run_here, takes
from .replay_options import Jobs, ReplayOptions, Report, TraceFile, progress_bar, publish

app = typer.Typer()


@app.command()
@takes("options", ReplayOptions)
def replay(
    file: TraceFile,
    options: ReplayOptions,
    workers: Annotated[str, typer.Option(help="Aggregated workers; several counts with commas between: each is replayed.")] = "",
    prefill: Annotated[str, typer.Option(help="Prefill workers, likewise; goes in pairs with --decode.")] = "",
    decode: Annotated[str, typer.Option(help="Decode workers, likewise.")] = "",
    split: Annotated[str, typer.Option(help="Prefill and decode workers in pairs: 6:2,5:3.")] = "",
    policy: Annotated[
        str, typer.Option(help="kv_aware, least_loaded, power_of_two, random, round_robin; several with commas.")
    ] = "kv_aware",
    jobs: Jobs = 0,
    report: Report = None,
    requests: Annotated[Path | None, typer.Option(metavar="OUT.jsonl", help="Write one line for each request and configuration.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object for each configuration, one a line.")] = False,
) -> None:
    """What a trace would see: the real routing on a virtual clock, with simulated engines.

    Options that take several values make a grid: every fleet with every policy, number of blocks and profile.
    """

    def body() -> None:
        from ..capacity.grid import configurations, described, label
        from ..capacity.replay_many import replay_all

        grid = configurations(options.grid(workers=workers, prefill=prefill, decode=decode, split=split, policy=policy))
        trace = options.trace(file)
        with progress_bar(len(grid), f"replaying {len(trace.requests):,} requests") as tell:
            results = replay_all([trace], grid, jobs, tell)
        for settings, result in zip(grid, results, strict=True):
            result.configuration = {**described(settings), "speedup": options.speedup, "limit": options.limit}
        labels = [label(settings, grid) for settings in grid]
        publish(f"{trace.name}, replayed", labels, results, as_json, report, requests)

    run_here(body)
