"""Results side by side: one column for each, the best of each row marked. For the terminal (rich) and for the page."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

Figures = Mapping[str, Any]
BEST_WITHIN = 0.005
"""Values this near to the best (relative) are marked too."""

COLUMN_WIDTH = 13


@dataclass(frozen=True)
class Row:
    """`value` may be None where a result has no such figure. `best`: which end is better; None where neither is."""

    name: str
    value: Callable[[Figures], float | None]
    text: Callable[[float], str]
    best: Callable[[Sequence[float]], float] | None = None


def milliseconds(value: float) -> str:
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"


def _latency(name: str, key: str) -> list[Row]:
    def part(which: str) -> Callable[[Figures], float | None]:
        return lambda figures: figures[key][which] if figures["completed"] else None

    return [Row(f"{name} {which}", part(which), milliseconds, min) for which in ("mean", "p50", "p99")]


def _transfer(figures: Figures) -> float | None:
    return figures["transfer_ms"]["mean"] if "prefill" in figures.get("workers", {}) and figures["completed"] else None


def _queued(which: str) -> Callable[[Figures], float | None]:
    """Of the pool with the longest queue."""

    def value(figures: Figures) -> float | None:
        return max((depth[which] for depth in figures["queue_depth"].values()), default=None)

    return value


ROWS: Sequence[Row] = (
    Row("completed", lambda figures: figures["completed"], lambda value: f"{value:,.0f}", max),
    Row("failed", lambda figures: figures["failed"], lambda value: f"{value:,.0f}", min),
    Row("hit rate", lambda figures: figures["hit_rate"], lambda value: f"{value:.1%}", max),
    *_latency("TTFT", "ttft_ms"),
    *_latency("ITL", "itl_ms"),
    *_latency("end to end", "e2e_ms"),
    Row("transfer mean", _transfer, milliseconds, min),
    Row("waiting, mean", _queued("mean"), lambda value: f"{value:.1f}", min),
    Row("waiting, most", _queued("max"), lambda value: f"{value:,.0f}", min),
    Row("preemptions", lambda figures: figures["preemptions"], lambda value: f"{value:,.0f}", min),
    Row("duration", lambda figures: figures["duration_s"], lambda value: f"{value:,.0f} s"),
    Row("wall time", lambda figures: figures["wall_s"], lambda value: f"{value:.1f} s"),
)


def cells(row: Row, results: Sequence[Figures], marked: bool = True) -> list[tuple[str, bool]]:
    """The text for each result, and whether it is among the best. Nothing is marked where all are alike."""
    values = [row.value(figures) for figures in results]
    known = [value for value in values if value is not None]
    best = row.best(known) if marked and row.best and len(set(known)) > 1 else None
    return [("-", False) if value is None else (row.text(value), _is_best(value, best)) for value in values]


def _is_best(value: float, best: float | None) -> bool:
    return best is not None and abs(value - best) <= BEST_WITHIN * abs(best)


def print_comparison(labels: Sequence[str], results: Sequence[Figures], heading: str, marked: bool = True) -> None:
    """In several tables where the terminal is too narrow for one; the marks compare all results."""
    console = Console()
    console.print(heading, highlight=False)
    columns = max(1, (console.width - 18) // (COLUMN_WIDTH + 2))
    for first in range(0, len(results), columns):
        table = Table(box=SIMPLE)
        table.add_column("")
        for label in labels[first : first + columns]:
            table.add_column(label, justify="right", max_width=COLUMN_WIDTH)
        for row in ROWS:
            shown = cells(row, results, marked)[first : first + columns]
            table.add_row(row.name, *(f"[bold green]{text} *[/]" if best else f"{text}  " for text, best in shown))
        console.print(table, highlight=False)
    if marked and len(results) > 1:
        console.print("* best of its row", style="dim")
