"""One process and its telemetry: off is off, on is what the variables say, and log lines say what they are about."""

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jetwake.deploy.log_lines import JsonLines, TextLines

HEAD = """
import sys
from jetwake.pipeline import instruments, tracing
from jetwake.pipeline.telemetry import telemetry
from jetwake.schemas import signals
"""
AWAY = "http://127.0.0.1:9"  # nobody listens on the port for discarding


def run(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: there is one telemetry in each."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    return subprocess.run(
        [sys.executable, "-c", HEAD + program], env=plain | variables, capture_output=True, text=True, timeout=60, check=False
    )


OFF = """
import jetwake.deploy.app, jetwake.deploy.worker, jetwake.producers.client
from jetwake.schemas.requests import InferenceRequest
request = InferenceRequest(request_id="r", gateway="g", model="m", prompt_tokens=b"")
with telemetry("router", "router-1"):
    instruments.add(signals.DEAD_LETTERS, 1, "routing")
    instruments.record(signals.BUS_ROUND_TRIP, 0.5)
    root = tracing.Root(lambda: 1, 1, tracing.SpanKind.CLIENT)
    assert root.carried_by(request) == request
    joined = tracing.Root(lambda: 1, 1, tracing.SpanKind.SERVER, {"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01"})
    assert joined.carried_by(request).trace == "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    with tracing.Leg(signals.ROUTE_SPAN, request, "router-1", lambda: 1) as leg:
        assert not leg.wanted
    root.end()
loaded = [name for name in sys.modules if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter", "prometheus_client"))]
assert not loaded, loaded
"""


@pytest.mark.parametrize("variables", [{}, {"OTEL_EXPORTER_OTLP_ENDPOINT": AWAY, "OTEL_SDK_DISABLED": "true"}])
def test_off_imports_no_sdk_and_passes_a_trace_on(variables: dict[str, str]) -> None:
    ended = run(OFF, **variables)
    assert ended.returncode == 0, ended.stderr


SERVED = """
import urllib.request
with telemetry("decode", "decode-1", 0) as told:
    for _ in range(3):
        instruments.add(signals.REQUESTS_ENDED, 1, "failed", "engine_dead")
    instruments.add(signals.REQUESTS_ENDED, 1, "failed", "a code that nobody knows")
    instruments.record(signals.BUS_ROUND_TRIP, 0.002)
    instruments.show(signals.QUEUE_WAITING, 7, "prefill", "prefill-1")
    instruments.show_all(signals.QUEUE_WAITING, {("prefill", "prefill-2"): 4})
    print(urllib.request.urlopen(told.url).read().decode())
"""


def test_metrics_are_served_with_bounded_labels_and_our_buckets() -> None:
    page = run(SERVED).stdout
    assert 'jetwake_requests_ended_total{code="engine_dead",outcome="failed"} 3.0' in page
    assert 'jetwake_requests_ended_total{code="other",outcome="failed"} 1.0' in page
    assert 'jetwake_bus_round_trip_seconds_bucket{le="0.0025"} 1.0' in page
    assert 'jetwake_queue_waiting{owner="prefill-2",queue="prefill"} 4.0' in page
    assert "prefill-1" not in page
    assert 'service_name="jetwake-decode"' in page


def test_a_collector_that_is_away_holds_up_nothing_for_long() -> None:
    program = """
import time
with telemetry("prefill", "prefill-1"):
    instruments.record(signals.BUS_ROUND_TRIP, 0.002)
    tracing.Root(lambda: 2, 1, tracing.SpanKind.CLIENT).end()
    began = time.monotonic()
print(time.monotonic() - began)
"""
    ended = run(program, OTEL_EXPORTER_OTLP_ENDPOINT=AWAY)
    assert ended.returncode == 0, ended.stderr
    assert float(ended.stdout) < 15, "each signal may take its three seconds, and a process must not outlive its grace period for that"


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER is 'zipkin'; here it is otlp or none"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "here it is http/protobuf"),
    ],
)
def test_a_variable_that_cannot_be_followed_is_said(variables: dict[str, str], words: str) -> None:
    ended = run("with telemetry('router', 'r'): pass", OTEL_EXPORTER_OTLP_ENDPOINT=AWAY, **variables)
    assert words in ended.stderr


def test_the_sdk_lives_in_one_place() -> None:
    """The import linter does not see into packages of others."""
    root = Path(__file__).parents[2]
    named = re.compile(r"^\s*(?:from|import) (?:opentelemetry\.(?:sdk|exporter)|prometheus_client)", re.MULTILINE)
    sources = [path for folder in ("schemas", "pipeline", "producers", "consumers", "deploy") for path in (root / folder).rglob("*.py")]
    assert sorted(path.name for path in sources if named.search(path.read_text())) == ["distribution_readers.py", "telemetry.py"]


def record(**about: object) -> logging.LogRecord:
    made = logging.LogRecord("jetwake.pipeline", logging.WARNING, "", 1, "attempt %d: %s", (1, "gone"), None)
    made.created, made.msecs = 1_767_323_045.678, 678.0
    vars(made).update(about)
    return made


def test_a_line_of_json_says_what_it_is_about() -> None:
    line = JsonLines().format(record(request_id="r-1", attempt=2, worker=""))
    assert json.loads(line) == {
        "time": "2026-01-02T03:04:05.678Z",
        "level": "warning",
        "logger": "jetwake.pipeline",
        "message": "attempt 1: gone",
        "request_id": "r-1",
        "attempt": 2,
    }


def test_a_line_of_json_holds_a_traceback_and_no_line_break() -> None:
    made = record()
    try:
        raise ValueError("two\nlines")
    except ValueError:
        made.exc_info = sys.exc_info()
    line = JsonLines().format(made)
    assert "\n" not in line
    assert "ValueError: two" in json.loads(line)["exception"]


def test_a_line_of_text_says_it_behind() -> None:
    assert (
        TextLines()
        .format(record(request_id="r-1", worker="decode-1"))
        .endswith("WARNING jetwake.pipeline: attempt 1: gone [request_id=r-1 worker=decode-1]")
    )
    assert TextLines().format(record()).endswith("attempt 1: gone")
