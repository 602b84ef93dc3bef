"""Counting and measuring, with nothing of OpenTelemetry but its API: it comes to nothing until `telemetry` was begun in this process.

Labels are given as values, in the order in which `schemas.signals` names them; one that a label does not have becomes "other". All is
kept here and only read when somebody asks, by the exporter's thread: measuring a thing costs little more than noting it.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

from ..schemas import signals
from ..schemas.signals import SERVICE, Metric
from ..schemas.timeline import Moment, Stage, stages

Rows = Mapping[tuple[str, ...], float]


class _Switch:
    """Of this process, as OpenTelemetry's own providers are."""

    on = False


_SWITCH = _Switch()


def are_read() -> bool:
    """Whether somebody reads them: else what must be asked for first need not be."""
    return _SWITCH.on


def will_be_read() -> None:
    """`telemetry` says so, before anything is measured."""
    _SWITCH.on = True


def add(metric: Metric, amount: float, *labels: str) -> None:
    """To a counter."""
    if not _SWITCH.on:
        return
    rows = _counter(metric).rows
    row = labels if labels in rows else _bound(metric, labels)  # rows are bound already
    rows[row] = rows.get(row, 0) + amount


def record(metric: Metric, value: float, *labels: str) -> None:
    """Into a histogram."""
    if _SWITCH.on:
        rows = _histogram(metric).rows
        found = rows.get(labels)
        if found is None:
            found = rows.setdefault(_bound(metric, labels), Distribution(metric.buckets))
        found.add(value)


def show(metric: Metric, value: float, *labels: str) -> None:
    """What a gauge says from now on, in this row."""
    if _SWITCH.on:
        _gauge(metric).rows[_bound(metric, labels)] = value


def show_all(metric: Metric, rows: Rows) -> None:
    """All that a gauge says from now on: rows that are not given are gone."""
    if _SWITCH.on:
        _gauge(metric).rows = {_bound(metric, labels): value for labels, value in rows.items()}


def record_stages(model: str, at: Mapping[Moment, float], *wanted: Stage) -> None:
    """Those of these stages that are over. To be called once for each, by whoever ended it."""
    if not _SWITCH.on:
        return
    for stage, length_s in stages(at).items():
        if stage in wanted:
            record(signals.STAGE_DURATION, length_s, stage, model)


class Distribution:
    """How values are spread over buckets, from the start of the process on."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self.least, self.most = math.inf, -math.inf

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value
        if value < self.least:
            self.least = value
        if value > self.most:
            self.most = value


class _Spread:
    """The rows of a histogram."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, ...], Distribution] = {}


def distributions() -> list[tuple[Metric, dict[str, Any], Distribution]]:
    """All there are: each with its metric and its labels."""
    spreads = [(metric, _histogram(metric)) for metric in signals.METRICS if metric.kind == "histogram"]
    return [(metric, _attributes(metric, labels), found) for metric, spread in spreads for labels, found in list(spread.rows.items())]


class _Kept:
    """The rows of a counter or a gauge."""

    def __init__(self, metric: Metric) -> None:
        self.rows: dict[tuple[str, ...], float] = {}
        self._metric = metric

    def observe(self, _: CallbackOptions) -> Iterable[Observation]:
        return [Observation(value, _attributes(self._metric, labels)) for labels, value in list(self.rows.items())]


def _bound(metric: Metric, labels: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(label.bound(value) for label, value in zip(metric.labels, labels, strict=True)) if labels else labels


def _attributes(metric: Metric, labels: tuple[str, ...]) -> dict[str, Any]:
    return {label.name: value for label, value in zip(metric.labels, labels, strict=True)}


@cache
def _meter() -> metrics.Meter:
    return metrics.get_meter(SERVICE)


@cache
def _counter(metric: Metric) -> _Kept:
    kept = _Kept(metric)
    _meter().create_observable_counter(metric.name, [kept.observe], metric.unit, metric.meaning)
    return kept


@cache
def _gauge(metric: Metric) -> _Kept:
    kept = _Kept(metric)
    _meter().create_observable_gauge(metric.name, [kept.observe], metric.unit, metric.meaning)
    return kept


@cache
def _histogram(_: Metric) -> _Spread:
    return _Spread()
