"""The page of `--report`: several results (replays, or a live bench) side by side, with plots. Pure: results in, HTML out."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .compare import ROWS, cells
from .html_charts import Axis, Point, cdf, lines
from .html_page import Html, Section, facts, number, page, table
from .replay_result import ReplayResult, Series

WINDOW = 0.05
"""The hit rate over time is that of so large a part of all samples together: of one alone it jumps."""
LEAST_WINDOW_SAMPLES = 20


def report_page(title: str, labels: Sequence[str], results: Sequence[ReplayResult], marked: bool = True) -> Html:
    """`labels` name the results, in their order. `marked`: say which is the best."""
    named = dict(zip(labels, results, strict=True))
    return page(title, _lead(results), [*_summary(named, marked), _latencies(named), *_over_time(named), _configuration(named)])


def _lead(results: Sequence[ReplayResult]) -> str:
    first = results[0]
    return f"{first.trace_name}: {len(first.requests):,} requests over {first.duration_s:,.0f} s. Times count from the start of the trace."


def _summary(named: Mapping[str, ReplayResult], marked: bool) -> list[Section]:
    figures = [result.figures() for result in named.values()]
    rows = [[row.name, *(f"{text} ★" if best else text for text, best in cells(row, figures, marked))] for row in ROWS]
    if len(figures) > 1:
        return [Section("Side by side", [table(["", *named], rows)], "★ marks the best of each row." if marked else "")]
    [one] = figures
    told = [(row.name, text) for row in ROWS for text, _ in cells(row, [one]) if text != "-"]
    return [Section("Figures", [facts(told)])]


def _latencies(named: Mapping[str, ReplayResult]) -> Section:
    def values(of: Callable[[Any], float]) -> dict[str, list[float]]:
        return {name: [1e3 * of(record) for record in result.requests if record.completed] for name, result in named.items()}

    return Section(
        "Latencies",
        [
            cdf("Time to first token", values(lambda record: record.ttft_s), Axis("time to first token", "ms", log=True)),
            cdf("Inter-token latency", values(lambda record: record.itl_s), Axis("mean time between a request's tokens", "ms", log=True)),
            cdf("End to end", values(lambda record: record.e2e_s), Axis("time to the last token", "ms", log=True)),
        ],
        "Of the requests that completed. Time on a logarithmic axis.",
    )


def _over_time(named: Mapping[str, ReplayResult]) -> list[Section]:
    seen = {name: result.series for name, result in named.items() if result.series.at_s}
    if not seen:
        return []
    time = Axis("time", "s")
    hits = lines("Cache hits", {name: _hit_rate(series) for name, series in seen.items()}, time, Axis("of prompt tokens", "%", most=1))
    sections = [
        Section("Queues", _by_pool("Waiting, {}", seen, lambda series: series.queue_depth, Axis("requests"))),
        Section(
            "Caches", [hits, *_by_pool("KV blocks in use, {}", seen, lambda series: series.used_kv_fraction, Axis("in use", "%", most=1))]
        ),
        Section("Running", _by_pool("Running, {}", seen, lambda series: series.running, Axis("requests"))),
    ]
    links = _by_pool("Link {}", seen, lambda series: series.link_use, Axis("busy", "%", most=1))
    if links:
        sections.append(Section("Links", links, "The part of the time in which KV caches were on their way."))
    return sections


def _by_pool(title: str, seen: Mapping[str, Series], part: Callable[[Series], Mapping[str, Sequence[float]]], y: Axis) -> list[Html]:
    """One chart for each pool (or link), with a line for each result that has it."""
    scale = 100 if y.unit == "%" else 1
    axis = Axis(y.label, y.unit, most=None if y.most is None else y.most * scale)
    pools = dict.fromkeys(pool for series in seen.values() for pool in part(series))
    charts = list[Html]()
    for pool in pools:
        curves = {
            name: [(at_s, scale * value) for at_s, value in zip(series.at_s, part(series).get(pool, ()), strict=False)]
            for name, series in seen.items()
        }
        charts.append(lines(title.format(pool), curves, Axis("time", "s"), axis))
    return charts


def _hit_rate(series: Series) -> list[Point]:
    points, window = list[Point](), max(LEAST_WINDOW_SAMPLES, round(WINDOW * len(series.at_s)))
    for end, at_s in enumerate(series.at_s, start=1):
        prompts = sum(series.prompt_tokens[max(0, end - window) : end])
        if prompts:
            points.append((at_s, 100 * sum(series.cached_tokens[max(0, end - window) : end]) / prompts))
    return points


def _configuration(named: Mapping[str, ReplayResult]) -> Section:
    return Section("Configuration", [table(["", *named], configuration_rows([result.configuration for result in named.values()]))])


def configuration_rows(configurations: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A row for each key that any of them has."""
    keys = dict.fromkeys(key for configuration in configurations for key in configuration)
    return [[key, *(_plain(configuration.get(key, "-")) for configuration in configurations)] for key in keys]


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_plain(part)}" for name, part in value.items())
    if isinstance(value, int | float) and not isinstance(value, bool):
        return number(value)
    return str(value)
