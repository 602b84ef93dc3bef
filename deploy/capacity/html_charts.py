"""Plots for `html_page`: lines, cumulative distributions and histograms, as SVG that takes the page's colours. Pure.

Long series are thinned to what a screen can show, keeping the least and the most of each stretch, so that peaks stay.
"""

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

from .html_page import Html, number

WIDTH, WIDE, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 480, 980, 262, 52, 12, 10, 42
PLOT_HEIGHT = HEIGHT - TOP - BOTTOM
MOST_POINTS = 400
COLOURS = 6
DASHES = ("", "7 4", "2 4")

Point = tuple[float, float]


@dataclass(frozen=True)
class Axis:
    """`log`: values of 0 and below are drawn at the low end. `most`: the axis reaches at least to there."""

    label: str
    unit: str = ""
    log: bool = False
    most: float | None = None

    def text(self, value: float) -> str:
        return number(value) + (self.unit if self.unit == "%" else f" {self.unit}" if self.unit else "")


def lines(title: str, series: Mapping[str, Sequence[Point]], x: Axis, y: Axis, wide: bool = False) -> Html:
    """One line for each series, its points in the order of x. A series of one needs no name; one without points is left out, and
    keeps its colour free: so a name has one colour in all charts of a page.
    """
    thinned = {name: _thinned(points) for name, points in series.items()}
    every = [point for points in thinned.values() for point in points]
    if not every:
        return _card(title, y.label, "", '<p class="note">Nothing to show.</p>', wide)
    across, up = (
        _Scale.over([p[0] for p in every], x, _plot_width(wide)),
        _Scale.over([p[1] for p in every], y, PLOT_HEIGHT, from_zero=True),
    )
    drawn, told = "", []
    for place, (name, points) in enumerate(thinned.items()):
        if not points:
            continue
        placed = [(LEFT + across.at(px), TOP + PLOT_HEIGHT - up.at(py)) for px, py in points]
        path = "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in placed)
        dash = DASHES[place // COLOURS % len(DASHES)]
        drawn += f'<path class="line" d="{path}" style="--c:var(--c{place % COLOURS})" stroke-dasharray="{dash}"/>'
        texts = [[round(px, 1), round(py, 1), x.text(vx), y.text(vy)] for (px, py), (vx, vy) in zip(placed, points, strict=True)]
        told.append([name, place % COLOURS, texts])
    return _card(title, y.label, _key(thinned), _svg(title, across, _axes(across, up, x, y) + drawn, told), wide)


def cdf(title: str, values: Mapping[str, Sequence[float]], x: Axis, wide: bool = False) -> Html:
    """How large a part of the values is at most x."""
    curves = dict[str, list[Point]]()
    for name, given in values.items():
        ordered = sorted(given)
        ranks = sorted({min(len(ordered) - 1, place * len(ordered) // 200) for place in range(201)}) if ordered else []
        curves[name] = [(ordered[rank], 100 * (rank + 1) / len(ordered)) for rank in ranks]
    return lines(title, curves, x, Axis("share at most", "%", most=100), wide)


def histogram(title: str, values: Sequence[float], x: Axis, bins: int = 40, y_label: str = "requests", wide: bool = False) -> Html:
    """Columns of equal width (of equal ratio on a log axis), the count in each."""
    if not values:
        return lines(title, {}, x, Axis(y_label))
    across = _Scale.over(values, x, _plot_width(wide))
    edges = [across.value(across.length * place / bins) for place in range(bins + 1)]
    counts = [0] * bins
    for value in values:
        counts[min(max(bisect_right(edges, value) - 1, 0), bins - 1)] += 1
    y = Axis(y_label)
    up, columns = _Scale.over(counts, y, PLOT_HEIGHT, from_zero=True), ""
    for place, count in enumerate(counts):
        height = up.at(count)
        if count:
            left, width = LEFT + across.length * place / bins, across.length / bins
            said = f"{number(edges[place])} to {x.text(edges[place + 1])}: {count:,}"
            columns += (
                f'<rect class="column" x="{left + 0.5:.1f}" y="{TOP + PLOT_HEIGHT - max(height, 1):.1f}" width="{max(width - 1, 1):.1f}" '
                f'height="{max(height, 1):.1f}" rx="1.5"><title>{escape(said)}</title></rect>'
            )
    return _card(title, y_label, "", _svg(title, across, _axes(across, up, x, y) + columns, []), wide)


@dataclass(frozen=True)
class _Scale:
    """From values to lengths. On a log axis `low` and `high` are logarithms."""

    low: float
    high: float
    length: int
    log: bool
    ticks: tuple[float, ...]

    @classmethod
    def over(cls, values: Sequence[float], axis: Axis, length: int, from_zero: bool = False) -> "_Scale":
        most = max(*values, axis.most) if axis.most is not None else max(values)
        positive = [value for value in values if value > 0]
        if axis.log and positive and most > 0:
            low, high = floor(10 * log10(min(positive))) / 10, ceil(10 * log10(most)) / 10
            low, high = (low, high) if high > low else (low - 0.5, high + 0.5)
            steps = (1, 2, 5) if high - low < 2.2 else (1,)
            ticks = [step * 10**power for power in range(floor(low) - 1, ceil(high) + 1) for step in steps]
            return cls(low, high, length, True, tuple(tick for tick in ticks if low - 1e-9 <= log10(tick) <= high + 1e-9))
        low = min(0.0, *values) if from_zero or min(values) < 0.3 * most else min(values)
        high = most if most > low else low + 1
        step = _nice_step((high - low) / max(4, length // 90))
        low, high = step * floor(low / step), high if not from_zero else step * ceil(high / step - 1e-9)
        return cls(low, high, length, False, tuple(low + step * place for place in range(int((high - low) / step + 1e-9) + 1)))

    def at(self, value: float) -> float:
        if self.log:
            value = log10(value) if value > 0 else self.low
        return self.length * min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)

    def value(self, length: float) -> float:
        value = self.low + (self.high - self.low) * length / self.length
        return 10**value if self.log else value


def _nice_step(least: float) -> float:
    size = 10 ** floor(log10(least))
    return next(step * size for step in (1, 2, 2.5, 5, 10) if step * size >= least * (1 - 1e-9))


def _thinned(points: Sequence[Point]) -> list[Point]:
    if len(points) <= MOST_POINTS:
        return list(points)
    kept, stretches = list[Point](), MOST_POINTS // 2
    for place in range(stretches):
        stretch = points[place * len(points) // stretches : (place + 1) * len(points) // stretches]
        ends = {min(range(len(stretch)), key=lambda at: stretch[at][1]), max(range(len(stretch)), key=lambda at: stretch[at][1])}
        kept += [stretch[at] for at in sorted(ends)]
    return kept


def _axes(across: _Scale, up: _Scale, x: Axis, y: Axis) -> Html:
    base, right, parts = TOP + PLOT_HEIGHT, LEFT + across.length, ""
    for tick in up.ticks:
        at = base - up.at(tick)
        parts += f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>'
        parts += f'<text x="{LEFT - 7}" y="{at + 4:.1f}" text-anchor="end">{number(tick)}{"%" if y.unit == "%" else ""}</text>'
    for tick in across.ticks:
        at = LEFT + across.at(tick)
        parts += f'<text x="{at:.1f}" y="{base + 17}" text-anchor="middle">{number(tick)}{"%" if x.unit == "%" else ""}</text>'
    parts += f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{base}" y2="{base}"/>'
    unit = f" ({x.unit})" if x.unit not in ("", "%", x.label) else ""
    return parts + f'<text x="{LEFT + across.length / 2}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x.label + unit)}</text>'


def _plot_width(wide: bool) -> int:
    return (WIDE if wide else WIDTH) - LEFT - RIGHT


def _svg(title: str, across: _Scale, inner: Html, told: list[list[object]]) -> Html:
    points = f' data-points="{escape(json.dumps(told, separators=(",", ":")))}" data-span="{TOP} {TOP + PLOT_HEIGHT}"' if told else ""
    box = f"0 0 {LEFT + across.length + RIGHT} {HEIGHT}"
    return f'<svg viewBox="{box}" role="img" aria-label="{escape(title)}"{points}>{inner}<g class="pointer"></g></svg>'


def _key(series: Mapping[str, Sequence[Point]]) -> Html:
    if len(series) < 2:
        return ""
    names = "".join(
        f'<span style="--c:var(--c{place % COLOURS})">{escape(name)}</span>'
        for place, (name, points) in enumerate(series.items())
        if points
    )
    return f'<div class="key">{names}</div>'


def _card(title: str, y_label: str, key: Html, inner: Html, wide: bool) -> Html:
    caption = f"<figcaption>{escape(title)} <small>{escape(y_label)}</small></figcaption>"
    return f'<figure class="card{" wide" if wide else ""}">{caption}{key}<div class="scroll">{inner}</div></figure>'
