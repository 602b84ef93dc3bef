"""Workloads as files: `trace stats`, `trace generate`."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from .common import AsJson, run_here, say, takes
from .replay_options import Report, TraceFile, write_text
from .trace_options import TextFiles

app = typer.Typer()

_LENGTHS = "LOW-HIGH, or with a long tail LOW-HIGH:MEDIAN:MEAN."


@app.command()
@takes("texts", TextFiles)
def stats(
    file: TraceFile,
    texts: TextFiles,
    block_size: Annotated[int, typer.Option("--block-size", min=1, help="Tokens in a KV block. Must divide the trace's grain.")] = 64,
    cache_blocks: Annotated[str, typer.Option(help="Sizes of the pooled cache, with commas between. Else: from few to all blocks.")] = "",
    limit: Annotated[int, typer.Option(min=0, help="Only the first so many requests. 0: all.")] = 0,
    report: Report = None,
    as_json: AsJson = False,
) -> None:
    """What a workload is like: arrivals, lengths, and how much of its prompts a prefix cache of which size would save."""

    def body() -> None:
        from dataclasses import asdict

        from ...schemas.errors import SetupError
        from ..capacity.prefix_reuse import PrefixReuse
        from ..capacity.trace_slice import sliced
        from ..capacity.trace_stats import trace_stats
        from ..capacity.trace_view import print_stats, stats_page

        sizes = [size.strip() for size in cache_blocks.split(",") if size.strip()]
        if not all(size.isdigit() and int(size) for size in sizes):
            raise SetupError(f"--cache-blocks takes numbers above 0 with commas between, not {cache_blocks!r}")
        trace = sliced(texts.read(file), limit)
        reuse = PrefixReuse(trace, block_size)
        found = trace_stats(trace, reuse, [int(size) for size in sizes])
        if report:
            write_text(report, stats_page(found, trace, reuse))
        if as_json:
            print(json.dumps(asdict(found)))
        else:
            print_stats(found, trace)

    run_here(body)


@app.command()
def generate(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Mooncake JSONL; gzipped when the name ends in .gz.")],
    preset: Annotated[str, typer.Option(help="agents, or mooncake-toolagent: as the published tool-and-agent trace.")] = "agents",
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same file.")] = 0,
    requests: Annotated[int | None, typer.Option(min=1, help="In all. Sessions become more or fewer with them.")] = None,
    rate: Annotated[float | None, typer.Option(min=0.001, help="Requests per second, in all.")] = None,
    sessions: Annotated[int | None, typer.Option(min=1, help="For agents, as all that follow.")] = None,
    open_sessions: Annotated[int | None, typer.Option(min=1, help="The newest sessions, among which the next turn is drawn.")] = None,
    prefixes: Annotated[int | None, typer.Option(min=1, help="Long shared beginnings: tool definitions, system prompts.")] = None,
    sharing: Annotated[float | None, typer.Option(min=0.0, help="Zipf exponent of the prefixes' use. 0: all alike.")] = None,
    prefix_tokens: Annotated[str | None, typer.Option(help=_LENGTHS)] = None,
    first_tokens: Annotated[str | None, typer.Option(help=f"What the first turn of a session says. {_LENGTHS}")] = None,
    user_tokens: Annotated[str | None, typer.Option(help=f"What each turn says. {_LENGTHS}")] = None,
    answer_tokens: Annotated[str | None, typer.Option(help=f"Output. {_LENGTHS}")] = None,
    burst_share: Annotated[float | None, typer.Option(min=0.0, help="Part of the requests that come in bursts on one prefix.")] = None,
    burst_requests: Annotated[str | None, typer.Option(metavar="LOW-HIGH", help="Requests in a burst.")] = None,
) -> None:
    """Make a trace of agents' work, whose statistics can be set."""

    def body() -> None:
        from ..capacity.agent_workload import parse_lengths
        from ..capacity.prefix_reuse import PrefixReuse
        from ..capacity.trace_formats import write_trace
        from ..capacity.trace_generator import generate_trace, trace_settings
        from ..capacity.trace_stats import trace_stats
        from ..capacity.trace_view import headline

        lengths = {
            "prefix_tokens": prefix_tokens,
            "first_tokens": first_tokens,
            "user_tokens": user_tokens,
            "answer_tokens": answer_tokens,
            "burst_requests": burst_requests,
        }
        numbers: dict[str, Any] = {
            "sessions": sessions,
            "open_sessions": open_sessions,
            "prefixes": prefixes,
            "sharing": sharing,
            "burst_share": burst_share,
        }
        own = {name: value for name, value in numbers.items() if value is not None}
        own |= {name: parse_lengths(text, f"--{name.replace('_', '-')}") for name, text in lengths.items() if text is not None}
        trace = generate_trace(trace_settings(preset, seed, requests, rate, own))
        write_trace(trace, output)
        say(f"{output}: {headline(trace_stats(trace, PrefixReuse(trace, trace.stretch_tokens)))}")

    run_here(body)
