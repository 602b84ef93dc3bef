"""Find the fleet for a workload: `size`."""

import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from .common import AsJson, run_here, takes
from .replay_options import Jobs, ReplayOptions, Report, TraceFile, progress_bar, write_text

if TYPE_CHECKING:
    from ..capacity.replay_result import ReplayResult
    from ..capacity.replay_settings import ReplaySettings
    from ..capacity.trace import Trace

app = typer.Typer()


@app.command()
@takes("options", ReplayOptions)
def size(
    file: TraceFile,
    options: ReplayOptions,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs to spend.")],
    ttft_slo_ms: Annotated[float, typer.Option(help="Most time to a request's first token.")],
    itl_slo_ms: Annotated[float, typer.Option(help="Most mean time between a request's tokens.")],
    gpus_per_worker: Annotated[int, typer.Option(min=0, help="0: as the profile says, else 1.")] = 0,
    policy: Annotated[str, typer.Option(help="How requests are routed.")] = "kv_aware",
    share: Annotated[float, typer.Option(help="Of all requests, how many must keep both limits.")] = 0.9,
    slice_requests: Annotated[int, typer.Option("--slice", min=0, help="Requests used in the search, from the start. 0: all.")] = 1000,
    tolerance: Annotated[float, typer.Option(min=0.001, max=1.0, help="How near the highest rate is found, relative.")] = 0.05,
    jobs: Jobs = 0,
    report: Report = None,
    as_json: AsJson = False,
) -> None:
    """Which fleet carries most: aggregated, or which split into prefill and decode workers, at which rate within the limits.

    --profile takes several, with commas: workers of one and of two GPUs, for example, are then compared.
    """

    def body() -> None:
        from ..capacity.grid import profiles_of
        from ..capacity.replay_many import replay_all
        from ..capacity.sizing import Limits, candidates_of
        from ..capacity.sizing import size as search
        from ..capacity.sizing_report import print_sizing, recommendation, sizing_page

        started_s = time.perf_counter()
        limits = Limits(ttft_slo_ms / 1e3, itl_slo_ms / 1e3, share)
        grid = options.grid(policy=policy)
        candidates = candidates_of(grid, profiles_of(grid), gpus, gpus_per_worker, policy)
        trace = options.trace(file)
        rounds = 0

        def run(traces: "Sequence[Trace]", settings: "Sequence[ReplaySettings]") -> "list[ReplayResult]":
            nonlocal rounds
            rounds += 1
            with progress_bar(len(settings), f"round {rounds}: {len(settings)} replays of {len(traces[0].requests):,} requests") as tell:
                return replay_all(traces, settings, jobs, tell)

        sizing = search(trace, candidates, gpus, limits, slice_requests, tolerance, run)
        if as_json:
            found = {
                **sizing.as_dict(),
                "recommendation": " ".join(recommendation(sizing)),
                "wall_s": round(time.perf_counter() - started_s, 3),
            }
            print(json.dumps(found))
        else:
            print_sizing(sizing)
        if report:
            write_text(report, sizing_page(sizing))

    run_here(body)
