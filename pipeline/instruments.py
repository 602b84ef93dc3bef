"""Counting and measuring, through OpenTelemetry's API alone: it comes to nothing until `telemetry` was begun in this process.

Labels are given as values, in the order in which `schemas.signals` names them; one that a label does not have becomes "other". Counters
and gauges are kept here and only read when somebody asks, by the exporter's thread: counting a thing costs no more than noting it.
"""

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Histogram, Observation

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
    rows, row = _counter(metric).rows, _bound(metric, labels)
    rows[row] = rows.get(row, 0) + amount


def record(metric: Metric, value: float, *labels: str) -> None:
    """Into a histogram."""
    if _SWITCH.on:
        _histogram(metric).record(value, _attributes(metric, _bound(metric, labels)))


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
def _histogram(metric: Metric) -> Histogram:
    return _meter().create_histogram(metric.name, metric.unit, metric.meaning, explicit_bucket_boundaries_advisory=metric.buckets)
