"""Counting and measuring, through OpenTelemetry's API alone: it comes to nothing until `telemetry` was begun in this process.

Labels are given as values, in the order in which `schemas.signals` names them; one that a label does not have becomes "other". May be
called from anywhere; what is exported is read by the exporter's own thread.
"""

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Counter, Histogram, Observation

from ..schemas import signals
from ..schemas.signals import SERVICE, Metric
from ..schemas.timeline import Moment, Stage, stages

Rows = Mapping[tuple[str, ...], float]


def are_read() -> bool:
    """Whether somebody reads them: else what must be asked for first need not be."""
    return type(metrics.get_meter_provider()).__module__.startswith("opentelemetry.sdk.")


def add(metric: Metric, amount: float, *labels: str) -> None:
    """To a counter."""
    _counter(metric).add(amount, _attributes(metric, labels))


def record(metric: Metric, value: float, *labels: str) -> None:
    """Into a histogram."""
    _histogram(metric).record(value, _attributes(metric, labels))


def show(metric: Metric, value: float, *labels: str) -> None:
    """What a gauge says from now on, in this row."""
    gauge = _gauge(metric)
    gauge.rows = {**gauge.rows, labels: value}


def show_all(metric: Metric, rows: Rows) -> None:
    """All that a gauge says from now on: rows that are not given are gone."""
    _gauge(metric).rows = dict(rows)


def record_stages(model: str, at: Mapping[Moment, float], *wanted: Stage) -> None:
    """Those of these stages that are over. To be called once for each, by whoever ended it."""
    for stage, length_s in stages(at).items():
        if stage in wanted:
            record(signals.STAGE_DURATION, length_s, stage, model)


class _Gauge:
    """Rows are replaced as a whole, so another thread may read them at any time."""

    def __init__(self, metric: Metric) -> None:
        self.rows: Rows = {}
        self._metric = metric
        _meter().create_observable_gauge(metric.name, [self._observe], metric.unit, metric.meaning)

    def _observe(self, _: CallbackOptions) -> Iterable[Observation]:
        return [Observation(value, _attributes(self._metric, labels)) for labels, value in self.rows.items()]


def _attributes(metric: Metric, labels: tuple[str, ...]) -> dict[str, Any]:
    return {label.name: label.bound(value) for label, value in zip(metric.labels, labels, strict=True)}


@cache
def _meter() -> metrics.Meter:
    return metrics.get_meter(SERVICE)


@cache
def _counter(metric: Metric) -> Counter:
    return _meter().create_counter(metric.name, metric.unit, metric.meaning)


@cache
def _histogram(metric: Metric) -> Histogram:
    return _meter().create_histogram(metric.name, metric.unit, metric.meaning, explicit_bucket_boundaries_advisory=metric.buckets)


@cache
def _gauge(metric: Metric) -> _Gauge:
    return _Gauge(metric)
