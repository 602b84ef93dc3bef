"""Dashboard, alert rules, Prometheus' and the collector's configuration: every name in them is one that the product tells."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml
from grafana_foundation_sdk.models.dashboard import Dashboard

from jetwake.consumers.engine_vllm.settings import VllmSettings
from jetwake.deploy.role_settings import WorkerSettings
from jetwake.schemas.signals import METRICS, Metric

from . import write_dashboards

DEPLOY = Path(__file__).parents[2] / "deploy"
ALERTS = DEPLOY / "prometheus" / "alerts.yaml"
RULES = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
ADDED = {"job", "instance", "le"}
"""Labels that Prometheus knows beside those of a metric."""
SUFFIXES = ("_bucket", "_sum", "_count")

SERIES: dict[str, Metric] = {}
for told in METRICS:
    SERIES |= {told.prometheus + suffix: told for suffix in SUFFIXES} if told.kind == "histogram" else {told.prometheus: told}

EXPRESSIONS = [("dashboard", text.replace("$__rate_interval", "5m")) for text in write_dashboards.expressions()] + [
    (rule["alert"], rule["expr"]) for rule in RULES
]


def labels_of(metric: Metric) -> set[str]:
    return {label.name.replace(".", "_") for label in metric.labels} | ADDED


def nodes(expression: promql.Expr) -> list[promql.Expr]:
    found: list[promql.Expr] = []
    promql.walk(expression, found.append)
    return found


def selectors(expression: promql.Expr) -> Iterator[promql.VectorSelector]:
    for node in nodes(expression):
        if isinstance(node, promql.VectorSelector):
            yield node


@pytest.mark.parametrize(("where", "text"), EXPRESSIONS)
def test_it_asks_for_what_is_told(where: str, text: str) -> None:
    expression = promql.parse(text)
    asked = list(selectors(expression))
    assert asked
    for selector in asked:
        metric = SERIES[selector.name]
        values = {label.name.replace(".", "_"): label.values for label in metric.labels}
        for matcher in selector.matchers.matchers:
            assert matcher.name in labels_of(metric), f"{selector.name} has no label {matcher.name}"
            if allowed := values.get(matcher.name):
                assert set(matcher.value.split("|")) <= set(allowed), f"{matcher.name} of {selector.name} is never {matcher.value}"
    for node in nodes(expression):
        if isinstance(node, promql.AggregateExpr) and node.modifier is not None:
            for selector in selectors(node.expr):
                assert set(node.modifier.labels) <= labels_of(SERIES[selector.name]), f"{selector.name} has no such label"
    counted = {selector.name for selector in asked if SERIES[selector.name].kind != "gauge"}
    rated = {
        argument.vector_selector.name
        for node in nodes(expression)
        if isinstance(node, promql.Call) and node.func.name in ("rate", "increase", "absent")
        for argument in node.args
        if isinstance(argument, promql.MatrixSelector)
    }
    if not text.startswith("absent("):
        assert rated == counted  # a counter means nothing but in its growth, and a gauge has none


def test_the_dashboard_is_as_its_source_says() -> None:
    stored = write_dashboards.FILE.read_text()
    assert stored == write_dashboards.text(), "run: python -m tests.deploy.write_dashboards"
    board = Dashboard.from_json(json.loads(stored))
    panels = [panel for panel in board.panels or [] if panel.type_val != "row"]
    assert len({panel.id_val for panel in board.panels or []}) == len(board.panels or [])
    assert len(panels) > 20
    assert all(panel.title and panel.description for panel in panels)


def test_every_metric_of_the_pipeline_is_looked_at() -> None:
    asked = {SERIES[selector.name] for _, text in EXPRESSIONS for selector in selectors(promql.parse(text))}
    told = {metric.name for metric in METRICS if metric.name.startswith("jetwake.")}
    unseen = told - {metric.name for metric in asked}
    # Details for a question of one's own.
    assert unseen == {
        "jetwake.gateway.responses",
        "jetwake.gateway.response.duration",
        "jetwake.process.started",
        "jetwake.router.in_hand",
        "jetwake.worker.free_slots",
        "jetwake.worker.held_handoffs",
    }


def test_thresholds_are_below_the_limits_that_they_warn_of() -> None:
    def threshold(alert: str) -> float:
        (expression,) = [promql.parse(rule["expr"]) for rule in RULES if rule["alert"] == alert]
        return float(expression.rhs.val)

    assert threshold("JetwakeEngineStandsStill") < WorkerSettings.model_fields["stall_limit_s"].default
    assert threshold("JetwakePrefillFullOfHandoffs") < WorkerSettings.model_fields["held_blocks_share"].default
    assert threshold("JetwakeHandoffsWait") < VllmSettings.model_fields["kv_lease_s"].default


def test_rules_are_what_prometheus_takes_and_fire_when_they_should() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed: it comes with Debian's package prometheus")
    for arguments in (
        ["check", "config", str(DEPLOY / "prometheus" / "prometheus.yaml")],
        ["check", "rules", str(ALERTS)],
        ["test", "rules", str(Path(__file__).with_name("alert_cases.yaml"))],
    ):
        done = subprocess.run([promtool, *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    tested = Path(__file__).with_name("alert_cases.yaml").read_text()
    for rule in RULES:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert set(rule["annotations"]) == {"summary", "description"}
    assert sum(rule["alert"] in tested for rule in RULES) >= 7


# ---------------------------------------------------------------------------- how it gets to Prometheus


def port(address: str) -> str:
    return address.rpartition(":")[2]


def test_the_collector_s_pipelines_are_of_parts_that_there_are() -> None:
    config = yaml.safe_load((DEPLOY / "collector" / "config.yaml").read_text())
    used: dict[str, set[str]] = {
        "receivers": set(),
        "processors": set(),
        "exporters": set(),
        "extensions": set(config["service"]["extensions"]),
    }
    for name, pipeline in config["service"]["pipelines"].items():
        assert name in ("metrics", "traces")
        assert pipeline["processors"][0] == "memory_limiter"
        for kind, parts in pipeline.items():
            used[kind] |= set(parts)
    assert {kind: set(config[kind]) for kind in used} == used


def test_what_is_pushed_gets_to_prometheus() -> None:
    services: dict[str, Any] = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())["services"]
    collector = yaml.safe_load((DEPLOY / "collector" / "config.yaml").read_text())
    prometheus = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yaml").read_text())
    (targets,) = [part["targets"] for scrape in prometheus["scrape_configs"] for part in scrape["static_configs"]]
    assert targets == [f"collector:{port(collector['exporters']['prometheus']['endpoint'])}"]
    (protocols,) = [receiver["protocols"] for receiver in collector["receivers"].values()]
    assert set(protocols) == {"http"}  # the one that roles push with
    roles = [service for service in services.values() if "JETWAKE_NATS_URL" in service.get("environment", {})]
    assert {service["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"] for service in roles} == {
        f"http://collector:{port(protocols['http']['endpoint'])}"
    }
    for service in services.values():
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            if source.startswith("."):
                assert (DEPLOY / "compose" / source).exists(), mount
