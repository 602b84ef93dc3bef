"""What `replay` and `size` share: options of workers, engine, timing and links; the trace; progress; reports. Nothing heavy is imported early."""

import json
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .trace_options import TextFiles

if TYPE_CHECKING:
    from ..capacity.grid import GridOptions
    from ..capacity.replay_result import ReplayResult
    from ..capacity.trace import Trace

TraceFile = Annotated[Path, typer.Argument(metavar="FILE", help="A trace: Mooncake, ShareGPT-like or OpenAI batch JSONL; may be gzipped.")]
Report = Annotated[Path | None, typer.Option("--report", metavar="OUT.html", help="Write one self-contained page with plots.")]
Jobs = Annotated[int, typer.Option(min=0, help="Replays at a time, each in a process. 0: as many as there are cores.")]

_PROFILE_HELP = "How fast a worker is: dynamo-default, a model on a GPU such as qwen3-32b@h100, qwen3-32b-fp8@h200x2, or a file that `jetwake profile` wrote."


@dataclass(frozen=True)
class ReplayOptions(TextFiles):
    """Options of one worker and of what joins them, and which part of the trace is replayed. The command asks for it with `@takes`."""

    profile: Annotated[str, typer.Option(help=_PROFILE_HELP)] = "dynamo-default"
    block_size: Annotated[int, typer.Option("--block-size", min=1, help="Tokens in a KV block. Must divide the trace's grain.")] = 64
    blocks: Annotated[str, typer.Option(help="KV blocks of each worker; auto: what fits, where the profile knows.")] = "16384"
    decode_blocks: Annotated[int, typer.Option(min=0, help="KV blocks of a decode worker. 0: as --blocks.")] = 0
    max_sequences: Annotated[int, typer.Option(min=1, help="Requests that an engine runs at once.")] = 256
    max_step_tokens: Annotated[int, typer.Option(min=1, help="Tokens that an engine computes in one step.")] = 8192
    event_lag_ms: Annotated[float, typer.Option(min=0.0, help="How late KV events and load reports reach the router.")] = 0.0
    knob: Annotated[list[str] | None, typer.Option(help="KEY=VALUE of kv_aware: `--knob temperature_s=0.1`. Repeatable.")] = None
    links: Annotated[Path | None, typer.Option(metavar="FILE", help="Links as `jetwake probe --save` measured them; flags below win.")] = (
        None
    )
    link_gbytes_per_s: Annotated[float, typer.Option(min=0.0, help="Link of each topology domain. 0: as the profile, else unlimited.")] = (
        0.0
    )
    between_gbytes_per_s: Annotated[float, typer.Option(min=0.0, help="Link between topology domains. 0: the same.")] = 0.0
    link_latency_ms: Annotated[float | None, typer.Option(min=0.0, help="Of each transfer.")] = None
    kv_bytes_per_token: Annotated[int, typer.Option(min=0, help="What a token weighs on a link. 0: as the profile, else 131072.")] = 0
    domains: Annotated[int, typer.Option(min=0, help="Topology domains, to which workers are dealt in turn. 0: as --links, else 1.")] = 0
    limit: Annotated[int, typer.Option(min=0, help="Only the first so many requests. 0: all.")] = 0
    speedup: Annotated[float, typer.Option(help="Requests come so many times as fast.")] = 1.0
    seed: Annotated[int, typer.Option(help="Of the policy. The same seed gives the same figures.")] = 0

    def grid(self, **own: Any) -> "GridOptions":
        from ..capacity.grid import GridOptions, LinkOptions
        from ..capacity.link_model import read_link_model

        measured = read_link_model(self.links).options() if self.links is not None else LinkOptions()
        link = LinkOptions(
            self.link_gbytes_per_s or measured.gbytes_per_s,
            self.between_gbytes_per_s or measured.between_gbytes_per_s,
            measured.latency_ms if self.link_latency_ms is None else self.link_latency_ms,
            self.kv_bytes_per_token,
            self.domains or measured.domains,
        )
        return GridOptions(
            profile=self.profile,
            blocks=self.blocks,
            block_size_tokens=self.block_size,
            decode_blocks=self.decode_blocks,
            max_sequences=self.max_sequences,
            max_step_tokens=self.max_step_tokens,
            event_lag_ms=self.event_lag_ms,
            knobs=self.knob or [],
            link=link,
            seed=self.seed,
            **own,
        )

    def trace(self, file: Path) -> "Trace":
        """Raises SetupError."""
        from ..capacity.trace_slice import sliced

        return sliced(self.read(file), self.limit, self.speedup)


@contextmanager
def progress_bar(total: int, what: str) -> Generator[Callable[[int, float], None]]:
    """On standard error, and only where somebody sees it. Yields what to tell: the place of a piece of work, and the part of it done."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task, done = bar.add_task(what, total=total), [0.0] * total

        def tell(place: int, part: float) -> None:
            done[place] = max(done[place], part)
            bar.update(task, completed=sum(done))

        yield tell


def write_text(path: Path, text: str) -> None:
    """Raises SetupError."""
    from ...schemas.errors import SetupError

    try:
        path.write_text(text)
    except OSError as error:
        raise SetupError(f"{path} cannot be written: {error.strerror}") from error


def publish(
    title: str,
    labels: Sequence[str],
    results: "Sequence[ReplayResult]",
    as_json: bool,
    report: Path | None,
    requests: Path | None,
    marked: bool = True,
) -> None:
    """On standard output as a table or as JSON, one line for each result; and to the files that were asked for. `marked`: say
    which is the best. Raises SetupError."""
    from ..capacity.compare import print_comparison
    from ..capacity.report import report_page

    figures = [result.figures() for result in results]
    if as_json:
        for one in figures:
            print(json.dumps(one))
    else:
        print_comparison(labels, figures, f"{title}: {len(results[0].requests):,} requests", marked)
    if report:
        write_text(report, report_page(title, labels, results, marked))
    if requests:
        _write_requests(requests, labels, results)


def _write_requests(path: Path, labels: Sequence[str], results: "Sequence[ReplayResult]") -> None:
    """One JSON object for each request, with the label of its configuration. Raises SetupError."""
    from dataclasses import asdict

    lines = (
        json.dumps({"configuration": label, **asdict(record)}) + "\n"
        for label, result in zip(labels, results, strict=True)
        for record in result.requests
    )
    write_text(path, "".join(lines))
