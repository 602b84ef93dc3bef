"""An OTLP collector in this process: takes traces and metrics over HTTP, as a real one does, and keeps them."""

import threading
from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Seen:
    """One span. `service`: who sent it."""

    service: str
    instance: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    error: str
    events: list[tuple[str, dict[str, Any]]]


class Collector:
    def __init__(self) -> None:
        self.url = ""
        self.spans: list[Seen] = []
        self.metrics: dict[str, set[str]] = defaultdict(set)

    def of_request(self, request_id: str) -> list[Seen]:
        return [span for span in self.spans if span.attributes.get("jetwake.request.id") == request_id]

    def take_traces(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            about = _plain(resource.resource.attributes)
            for span in (span for scope in resource.scope_spans for span in scope.spans):
                events = [(event.name, _plain(event.attributes)) for event in span.events]
                ids = span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()
                times = span.start_time_unix_nano, span.end_time_unix_nano
                error = span.status.message if span.status.code == 2 else ""
                self.spans.append(
                    Seen(
                        about["service.name"], about["service.instance.id"], span.name, *ids, *times, _plain(span.attributes), error, events
                    )
                )

    def take_metrics(self, body: bytes) -> None:
        for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
            about = _plain(resource.resource.attributes)
            self.metrics[about["service.name"]] |= {metric.name for scope in resource.scope_metrics for metric in scope.metrics}


@contextmanager
def collecting() -> Generator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                raise NotImplementedError
            (collector.take_traces if self.path == "/v1/traces" else collector.take_metrics)(body)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _plain(attributes: Any) -> dict[str, Any]:
    return {attribute.key: _value(attribute.value) for attribute in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind) if kind else None
