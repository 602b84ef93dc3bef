"""`jetwake trace stats` for people: tables and sparklines in the terminal, and one HTML page."""

from collections.abc import Sequence

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from .html_charts import Axis, cdf, histogram, lines
from .html_page import Html, Section, facts, number, page, table
from .prefix_reuse import PrefixReuse
from .trace import Trace
from .trace_stats import Spread, TraceStats, per_minute

SPARKS = " ▁▂▃▄▅▆▇█"
BAR_WIDTH = 30
SPARK_WIDTH = 60


def print_stats(stats: TraceStats, trace: Trace) -> None:
    console = Console()
    console.print(f"[bold]{stats.name}[/]: {headline(stats)}", highlight=False)
    for note in stats.notes:
        console.print(f"[dim]{note}[/]", highlight=False)
    console.print(
        f"\nrequests by time  {sparkline(per_minute(trace))}  [dim]at most {stats.peak_per_minute:,} a minute[/]", highlight=False
    )
    lengths = Table(box=SIMPLE)
    for heading in ("tokens", "mean", "least", "p10", "p50", "p90", "p99", "most"):
        lengths.add_column(heading, justify="left" if heading == "tokens" else "right")
    for name, spread in _spreads(stats):
        lengths.add_row(name, *_cells(spread))
    console.print(lengths)
    console.print(f"reuse by one LRU cache for all, in blocks of {stats.block_size_tokens} tokens", highlight=False)
    caches = Table(box=SIMPLE)
    for heading in ("blocks", "tokens", "reuse"):
        caches.add_column(heading, justify="right")
    caches.add_column("")
    for size in stats.pooled_reuse:
        caches.add_row(f"{size.blocks:,}", number(size.blocks * stats.block_size_tokens), f"{size.reuse:.1%}", _bar(size.reuse))
    caches.add_row("endless", number(stats.distinct_blocks * stats.block_size_tokens), f"{stats.ideal_reuse:.1%}", _bar(stats.ideal_reuse))
    console.print(caches)
    if stats.top_prefixes:
        console.print("shared prefixes that save most")
        prefixes = Table(box=SIMPLE)
        for heading in ("tokens", "requests", "of all reuse"):
            prefixes.add_column(heading, justify="right")
        for row in _prefix_rows(stats, trace):
            prefixes.add_row(*row)
        console.print(prefixes)


def stats_page(stats: TraceStats, trace: Trace, reuse: PrefixReuse) -> Html:
    counts = per_minute(trace)
    whole = counts[:-1] or counts  # the last minute is cut short
    minutes = [(float(minute), float(count)) for minute, count in enumerate(whole)]
    sizes = [
        2 ** (step / 4) for step in range(4 * max(0, stats.distinct_blocks.bit_length() - 12), 4 * stats.distinct_blocks.bit_length() + 1)
    ]
    curve = [(size, 100 * reuse.pooled(int(size))) for size in sizes]
    shared = [tokens for tokens in reuse.known_tokens if tokens]
    tokens = Axis("tokens", "tokens", log=True)
    spreads = [[name, *_cells(spread)] for name, spread in _spreads(stats)]
    return page(
        f"Trace {stats.name}",
        " · ".join([headline(stats), *stats.notes]),
        [
            Section("Overview", [facts(_facts(stats)), table(["Tokens", "mean", "least", "p10", "p50", "p90", "p99", "most"], spreads)]),
            Section(
                "Arrivals and lengths",
                [
                    lines("Arrivals", {"": minutes}, Axis("time", "min"), Axis("requests per minute"), wide=True),
                    histogram("Input lengths", [request.input_tokens for request in trace.requests], tokens),
                    histogram("Output lengths", [request.output_tokens for request in trace.requests], tokens),
                ],
            ),
            Section(
                "Prefixes in common",
                [
                    lines(
                        "Reuse by cache size",
                        {"": curve},
                        Axis("cache size", "blocks", log=True),
                        Axis("of all prompt tokens", "%", most=100 * stats.ideal_reuse),
                    ),
                    cdf("Length of the known prefix", {"": shared}, tokens),
                    table(
                        ["Tokens from the start", "requests", "of all reuse"], _prefix_rows(stats, trace), "Shared prefixes that save most"
                    ),
                ],
                f"One LRU cache for all requests, in blocks of {stats.block_size_tokens} tokens: what a router could reach if it made of its "
                f"fleet's caches one. {stats.sharing_requests:.1%} of the requests begin with something that came before.",
            ),
        ],
    )


def sparkline(values: Sequence[float]) -> str:
    width = min(len(values), SPARK_WIDTH)
    groups = [values[place * len(values) // width : (place + 1) * len(values) // width] for place in range(width)]
    means = [sum(group) / len(group) for group in groups]
    most = max(means, default=0) or 1
    return "".join(SPARKS[max(1 if mean else 0, round(mean / most * (len(SPARKS) - 1)))] for mean in means)


def _bar(part: float) -> str:
    eighths = round(part * BAR_WIDTH * 8)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def headline(stats: TraceStats) -> str:
    time = f"in {_duration(stats.duration_s)}" if stats.rate_per_s else "at once"
    return f"{stats.requests:,} requests {time}, an endless cache would hit {stats.ideal_reuse:.1%}"


def _facts(stats: TraceStats) -> list[tuple[str, str]]:
    found = [("Requests", f"{stats.requests:,}"), ("Duration", _duration(stats.duration_s))]
    if stats.rate_per_s is not None and stats.gap_cv is not None:
        found += [("Rate", f"{stats.rate_per_s:.3g}/s"), ("Peak", f"{stats.peak_per_minute:,}/min"), ("CV of gaps", f"{stats.gap_cv:.2f}")]
    found += [
        ("Mean input", f"{stats.input_tokens.mean:,.0f}"),
        ("Mean output", f"{stats.output_tokens.mean:,.0f}"),
        ("Ideal reuse", f"{stats.ideal_reuse:.1%}"),
        ("Distinct blocks", number(stats.distinct_blocks)),
    ]
    if stats.sessions and stats.turns:
        found += [("Sessions", f"{stats.sessions:,}"), ("Turns each", f"{stats.turns.mean:.2f}")]
    return found


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.1f} min" if seconds >= 120 else f"{seconds:.1f} s"


def _spreads(stats: TraceStats) -> list[tuple[str, Spread]]:
    found = [("input", stats.input_tokens), ("output", stats.output_tokens)]
    if stats.shared_tokens:
        found.append(("known prefix", stats.shared_tokens))
    return found


def _cells(spread: Spread) -> list[str]:
    return [f"{value:,.0f}" for value in (spread.mean, spread.least, spread.p10, spread.p50, spread.p90, spread.p99, spread.most)]


def _prefix_rows(stats: TraceStats, trace: Trace) -> list[list[str]]:
    reused = stats.ideal_reuse * sum(request.input_tokens for request in trace.requests)
    return [[f"{prefix.tokens:,}", f"{prefix.requests:,}", f"{prefix.saved_tokens / reused:.1%}"] for prefix in stats.top_prefixes]
