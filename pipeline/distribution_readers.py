"""OpenTelemetry's two metric readers, which also read the histograms that `instruments` keeps.

The SDK's own histograms cost some ten microseconds for each value, in the middle of a request. Ours are handed over with the rest when
somebody reads. Imported by `telemetry` alone, when metrics are wanted: this imports the SDK.
"""

import time
from typing import Any

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricReader,
    MetricsData,
    PeriodicExportingMetricReader,
    ResourceMetrics,
    ScopeMetrics,
)
from prometheus_client import CollectorRegistry

from . import instruments

_STARTED_NS = time.time_ns()


class _Prometheus(PrometheusMetricReader):
    def _receive_metrics(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any) -> None:
        super()._receive_metrics(with_distributions(metrics_data), timeout_millis, **kwargs)  # pyright: ignore[reportUnknownMemberType]


class _Periodic(PeriodicExportingMetricReader):
    def _receive_metrics(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any) -> None:
        super()._receive_metrics(with_distributions(metrics_data), timeout_millis, **kwargs)  # pyright: ignore[reportUnknownMemberType]


def prometheus_reader(registry: CollectorRegistry) -> MetricReader:
    return _Prometheus(registry=registry, scope_info_enabled=False)


def periodic_reader(exporter: MetricExporter) -> MetricReader:
    return _Periodic(exporter)


def with_distributions(data: MetricsData) -> MetricsData:
    """The readings, with ours in the same scope. There is always one: the start of the process."""
    [resource] = data.resource_metrics
    [scope] = resource.scope_metrics
    whole = ScopeMetrics(scope.scope, [*scope.metrics, *_histograms()], scope.schema_url)
    return MetricsData([ResourceMetrics(resource.resource, [whole], resource.schema_url)])


def _histograms() -> list[Metric]:
    now_ns = time.time_ns()
    points: dict[instruments.Metric, list[HistogramDataPoint]] = {}
    for metric, attributes, found in instruments.distributions():
        counts = list(found.counts)
        point = HistogramDataPoint(
            attributes=attributes,
            start_time_unix_nano=_STARTED_NS,
            time_unix_nano=now_ns,
            count=sum(counts),
            sum=found.sum,
            bucket_counts=counts,
            explicit_bounds=found.bounds,
            min=found.least,
            max=found.most,
        )
        points.setdefault(metric, []).append(point)
    return [
        Metric(metric.name, metric.meaning, metric.unit, Histogram(found, AggregationTemporality.CUMULATIVE))
        for metric, found in points.items()
    ]
