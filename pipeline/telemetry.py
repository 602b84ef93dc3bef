"""Sends what `instruments` and `tracing` gather out of this process. The only place that knows OpenTelemetry's SDK, with
`distribution_readers`.

Reads the standard `OTEL_*` environment variables: with an endpoint, traces and metrics are pushed there (OTLP over HTTP); the sampler
is `OTEL_TRACES_SAMPLER`. With a port, metrics are served to Prometheus there. Promises: with neither, the SDK is not even imported;
a collector that is away costs a log line, and at most `CLOSE_S` for each of the two at the end of the process.
"""

import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from opentelemetry import metrics, trace

from ..schemas import signals
from ..schemas.errors import SetupError
from ..schemas.signals import SERVICE
from . import instruments

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricReader
    from opentelemetry.sdk.resources import Resource

CLOSE_S = 3.0
_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


@dataclass(frozen=True)
class Telemetry:
    """`metrics_text`: what Prometheus would get now; empty where nobody asked for that. `url`: where it is served."""

    metrics_text: Callable[[], bytes] = lambda: b""
    url: str = ""


OFF = Telemetry()


@contextmanager
def telemetry(
    role: str, name: str, metrics_port: int | None = None, metrics_host: str = "127.0.0.1", *, keeps_text: bool = False
) -> Generator[Telemetry]:
    """For this process, as long as the body runs; once. `keeps_text`: somebody asks for `metrics_text`, without a port of its own.

    Raises SetupError: the port is taken, or a variable cannot be understood.
    """
    disabled = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    pushes_traces, pushes_metrics = not disabled and _pushes("traces"), not disabled and _pushes("metrics")
    serves = metrics_port is not None or keeps_text
    if not (pushes_traces or pushes_metrics or serves):
        yield OFF
        return
    from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, SERVICE_VERSION, Resource

    named = {SERVICE_NAME: f"{SERVICE}-{role}", SERVICE_INSTANCE_ID: name, SERVICE_VERSION: version(SERVICE)}
    own = {key: value for key, value in named.items() if key != SERVICE_NAME or not os.environ.get("OTEL_SERVICE_NAME")}
    resource = Resource.create(own)
    closing: list[Callable[[], Any]] = []
    try:
        if pushes_traces:
            closing.append(_send_traces(resource))
        found = OFF
        if pushes_metrics or serves:
            found = _read_metrics(resource, pushes_metrics, serves, metrics_port, metrics_host, closing)
        yield found
    finally:
        for close in reversed(closing):
            close()


def _pushes(signal: str) -> bool:
    """Whether this signal has somewhere to go, by the standard variables."""
    exporters = os.environ.get(f"OTEL_{signal.upper()}_EXPORTER", "otlp").strip().lower()
    if exporters == "none" or not (os.environ.get(_ENDPOINT) or os.environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT")):
        return False
    if exporters != "otlp":
        raise SetupError(f"OTEL_{signal.upper()}_EXPORTER is {exporters!r}; here it is otlp or none")
    protocol = os.environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL") or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    if protocol not in (None, "", "http/protobuf"):
        raise SetupError(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}; here it is http/protobuf (a collector has that on port 4318)")
    return True


def _timeout_s(signal: str) -> float | None:
    """For one export with all its tries. None: as the variables say."""
    said = {f"OTEL_EXPORTER_OTLP_{signal}_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT"} & os.environ.keys()
    return None if said else CLOSE_S


def _send_traces(resource: "Resource") -> Callable[[], None]:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(timeout=_timeout_s("TRACES"))))
    trace.set_tracer_provider(provider)

    def close() -> None:
        provider.force_flush(int(CLOSE_S * 1000))
        provider.shutdown()

    return close


def _read_metrics(
    resource: "Resource", pushes: bool, serves: bool, port: int | None, host: str, closing: list[Callable[[], Any]]
) -> Telemetry:
    from opentelemetry.sdk.metrics import MeterProvider

    from .distribution_readers import periodic_reader, prometheus_reader

    readers: list[MetricReader] = []
    found = OFF
    if serves:
        from prometheus_client import CollectorRegistry, generate_latest, start_http_server

        registry = CollectorRegistry()
        readers.append(prometheus_reader(registry))
        url = ""
        if port is not None:
            try:
                server, _ = start_http_server(port, host, registry)
            except OSError as error:
                raise SetupError(
                    f"metrics cannot be served on {host}:{port}: {error.strerror or error}; give another --metrics-port"
                ) from error
            closing.append(server.shutdown)
            url = f"http://{host}:{server.server_port}/metrics"
        found = Telemetry(lambda: generate_latest(registry), url)
    if pushes:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

        readers.append(periodic_reader(OTLPMetricExporter(timeout=_timeout_s("METRICS"))))
    provider = MeterProvider(readers, resource, shutdown_on_exit=False)
    metrics.set_meter_provider(provider)
    instruments.will_be_read()
    instruments.show(signals.PROCESS_STARTED, time.time())
    closing.append(lambda: provider.shutdown(CLOSE_S * 1000))
    return found
