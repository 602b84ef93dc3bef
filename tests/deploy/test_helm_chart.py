"""The chart, rendered by Helm's own library: valid Kubernetes objects, commands that the product takes, and numbers and names as the code has them."""

import asyncio
import json
import re
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml
from cloudcoil.models.keda import v1alpha1 as keda

from jetwake.consumers.engine_vllm.settings import VllmSettings
from jetwake.deploy.configuration import SECTIONS, variable
from jetwake.deploy.local import AFTER_GRACE_S
from jetwake.deploy.nats_server import NatsServer, find_binary
from jetwake.deploy.role_settings import RouterSettings, WorkerSettings
from jetwake.pipeline.connection import Bus
from jetwake.pipeline.settings import BrokerSettings, TopologySettings
from jetwake.pipeline.topology import ensure_topology
from jetwake.producers.gateway.settings import GatewaySettings
from jetwake.schemas import streams
from jetwake.schemas.subjects import domain_token

from . import write_chart_values
from .command_lines import commands, parsed

HELM = Path(__file__).parents[2] / "deploy" / "helm"
CHART = HELM / "jetwake"
KUBERNETES = "1.35"
SMALLEST = {"model": "org/model", "nats": {"url": "nats://nats.nats:4222"}}
EXAMPLES = {path.stem: yaml.safe_load(path.read_text()) for path in sorted((HELM / "examples").glob("*.yaml"))}
AUTOSCALED = EXAMPLES["scale-to-zero"]
EVERYTHING: dict[str, Any] = SMALLEST | {
    "models": {"existingClaim": "models", "cacheClaim": "cache", "hubTokenSecret": "hub"},
    "nats": {"url": "tls://nats.nats:4222", "port": 4333, "tls": {"caSecret": "ca", "clientSecret": "client"}},
    "images": {"pullSecrets": [{"name": "registry"}]},
    "gateway": {"apiKeysSecret": "keys", "extraArgs": ["--tool-call-parser", "hermes"], "service": {"annotations": {"a": "b"}}},
    "router": {"options": {"direct_max_new_tokens": 256}},
    "poolDefaults": {
        "gpus": 2,
        "domainFromLabel": "topology.kubernetes.io/zone",
        "engineOptions": {"max_model_len": 4096, "quantization": "fp8"},
        "workerOptions": {"stall_limit_s": 20},
        "env": {"UCX_NET_DEVICES": "mlx5_0:1"},
        "rdma": True,
        "hostNetwork": True,
        "runtimeClassName": "nvidia",
        "priorityClassName": "high",
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "affinity": {"podAntiAffinity": {}},
        "spread": [{"topologyKey": "kubernetes.io/hostname"}],
    },
    "pools": {"aggregated": {"main": {"replicas": 0}}},
    "telemetry": {"metricsPort": 9464, "otlpEndpoint": "http://collector.monitoring:4318", "env": {"OTEL_TRACES_SAMPLER": "always_on"}},
    "serviceAccount": {"annotations": {"a": "b"}},
    "labels": {"team": "llm"},
}
INSTALLATIONS: Mapping[str, dict[str, Any]] = {"smallest": SMALLEST, "everything": EVERYTHING, **EXAMPLES}
POD = {"POD_NAME": "jw-jetwake-decode-main-7d9f8c6b5-abcde", "POD_IP": "10.1.2.3", "POD_DOMAIN": "zone-1"}

Object = dict[str, Any]


def render(values: dict[str, Any]) -> list[Object]:
    with helm_python.Chart.load(str(CHART)) as chart:
        chart.validate_schema(values)
        files = chart.render(values, name="jw", namespace="llm")
    texts = [text for name, text in sorted(files.items()) if not name.endswith(".txt")]
    return [found for text in texts for found in yaml.safe_load_all(text) if found]


@pytest.fixture(scope="module", params=INSTALLATIONS)
def objects(request: pytest.FixtureRequest) -> list[Object]:
    return render(INSTALLATIONS[request.param])


def pods(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    for found in objects:
        if found["kind"] in ("Deployment", "StatefulSet"):
            template = found["spec"]["template"]
            yield template["metadata"]["labels"]["app.kubernetes.io/component"], template


def container(pod: Object) -> Object:
    (only,) = pod["spec"]["containers"]
    return only


def command_of(pod: Object) -> tuple[str, dict[str, Any]]:
    return parsed([re.sub(r"\$\((\w+)\)", lambda found: POD[found[1]], word) for word in container(pod)["args"]])


def matches(selector: Object, labels: dict[str, str]) -> bool:
    wanted = selector.get("matchLabels", {}).items() <= labels.items()
    return wanted and all(labels.get(rule["key"]) in rule["values"] for rule in selector.get("matchExpressions", []))


def test_lint_finds_nothing() -> None:
    found = helm_python.lint(str(CHART))
    assert [message["error"] for message in found["messages"] if message["severity"] > 1] == []


def test_objects_are_what_kubernetes_takes(objects: list[Object]) -> None:
    names = [(found["kind"], found["metadata"]["name"]) for found in objects]
    assert len(set(names)) == len(names)
    for found in objects:
        assert len(found["metadata"]["name"]) <= 52
        if found["apiVersion"].startswith("keda.sh/"):
            typed = keda.ScaledObject.model_validate(found).model_dump(mode="json", by_alias=True, exclude_unset=True)
            assert typed == found  # what KEDA does not know would be gone
        else:
            kubernetes_validate.validate(found, KUBERNETES, strict=True)


def test_pods_are_closed(objects: list[Object]) -> None:
    for component, pod in pods(objects):
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"], component
        assert not spec["automountServiceAccountToken"]
        assert not spec["enableServiceLinks"]  # its variables would be taken for settings
        security = container(pod)["securityContext"]
        assert security["readOnlyRootFilesystem"]
        assert security["capabilities"]["drop"] == ["ALL"]
        assert "version" not in " ".join(pod["metadata"]["labels"])  # a new version of the chart alone restarts nothing


def test_a_pod_runs_a_role_and_has_the_time_to_drain(objects: list[Object]) -> None:
    roles = [(component, pod) for component, pod in pods(objects) if component != "nats"]
    commands = sorted(command_of(pod)[0] for _, pod in roles)
    assert {"router", "gateway", "prefill", "decode"} <= set(commands)
    for component, pod in roles:
        command, given = command_of(pod)
        grace_s = pod["spec"]["terminationGracePeriodSeconds"]
        if component == "worker":
            assert f"grace_s={grace_s - AFTER_GRACE_S:g}" in given["worker_option"]
            assert "side_channel_host=10.1.2.3" in given["engine_option"]
            assert given["name"] == POD["POD_NAME"]
        elif component == "router":
            assert f"grace_s={grace_s - AFTER_GRACE_S:g}" in given["router_option"]
        else:
            waits_s = container(pod)["lifecycle"]["preStop"]["sleep"]["seconds"]
            assert grace_s == waits_s + GatewaySettings.model_fields["grace_s"].default + AFTER_GRACE_S
            assert command == "gateway"


def test_defaults_are_those_of_the_code() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert values["poolDefaults"]["graceSeconds"] == WorkerSettings.model_fields["grace_s"].default
    assert values["poolDefaults"]["startTimeoutSeconds"] == VllmSettings.model_fields["start_timeout_s"].default
    assert values["router"]["graceSeconds"] == RouterSettings.model_fields["grace_s"].default
    assert values["router"]["policy"] == RouterSettings.model_fields["policy"].default
    assert values["gateway"]["startTimeoutSeconds"] == GatewaySettings.model_fields["model_timeout_s"].default
    (in_hand,) = re.findall(r"ternary (\d+) (\d+)\) \| int", (CHART / "templates/scaledobjects.yaml").read_text())
    assert max(map(int, in_hand)) < VllmSettings.model_fields["max_num_seqs"].default


def test_probes_mean_progress(objects: list[Object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JETWAKE_HEALTH_FILE", "as the image says")
    for component, pod in pods(objects):
        probes = {name: container(pod)[f"{name}Probe"] for name in ("startup", "liveness", "readiness")}
        if component in ("router", "worker"):
            asked = {name: parsed(probe["exec"]["command"][1:])[1]["ready"] for name, probe in probes.items()}
            assert asked == {"startup": True, "liveness": False, "readiness": True}
        elif component == "gateway":
            paths = {name: probe["httpGet"]["path"] for name, probe in probes.items()}
            assert paths == {"startup": "/health", "liveness": "/health", "readiness": "/ready"}


def test_selectors_find_pods(objects: list[Object]) -> None:
    labels = [pod["metadata"]["labels"] for _, pod in pods(objects)]
    for found in objects:
        spec = found.get("spec", {})
        selector = {"PodDisruptionBudget": "selector", "NetworkPolicy": "podSelector"}.get(found["kind"])
        if selector:
            assert any(matches(spec[selector], there) for there in labels), found["metadata"]["name"]
        if found["kind"] == "Service":
            assert any(spec["selector"].items() <= there.items() for there in labels)
    budgets = [found["spec"]["selector"] for found in objects if found["kind"] == "PodDisruptionBudget"]
    for there in labels:
        assert sum(matches(selector, there) for selector in budgets) == 1


def test_variables_are_those_of_the_commands(objects: list[Object]) -> None:
    of_all = {variable(section.name, key) for section in SECTIONS for key in section.keys}
    for component, pod in pods(objects):
        if component == "nats":
            continue
        known = of_all | {parameter.envvar for parameter in commands()[command_of(pod)[0]].params}
        given = {given["name"] for given in container(pod)["env"] if given["name"].startswith("JETWAKE_")}
        assert given - known == set()


def test_what_is_said_of_a_pool_gets_to_its_workers() -> None:
    workers = [pod for component, pod in pods(render(EVERYTHING)) if component == "worker"]
    assert len(workers) == 3
    for pod in workers:
        command, given = command_of(pod)
        assert given["domain"] == "zone-1"
        options = {
            "device=cuda",
            "enforce_eager=false",
            "tensor_parallel=2",
            "require_routable_host=true",
            "max_model_len=4096",
            "quantization=fp8",
        }
        assert set(given["engine_option"]) == options | {"side_channel_host=10.1.2.3"}, command
        made = container(pod)
        assert made["resources"]["limits"]["nvidia.com/gpu"] == 2
        assert made["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
        assert {"name": "UCX_NET_DEVICES", "value": "mlx5_0:1"} in made["env"]


def test_policies_let_through_what_is_said() -> None:
    egress = {
        rule["port"]
        for found in render(EVERYTHING)
        if found["kind"] == "NetworkPolicy"
        for allowed in found["spec"].get("egress", [])
        for rule in allowed.get("ports", [])
    }
    assert egress == {53, 443, 4333, 4318}


def test_an_installation_says_what_it_lacks() -> None:
    for values, complaint in (
        ({"nats": {"url": "nats://x:4222"}}, "model: which one"),
        ({"model": "m"}, "nats.url: which NATS"),
        (SMALLEST | {"poolDefaults": {"autoscaling": {"enabled": True}}}, "nats.monitoring"),
        (SMALLEST | {"poolDefaults": {"domain": "a", "domainFromLabel": "zone"}}, "not both"),
        (AUTOSCALED | {"pools": {"decode": {"main": {"domain": "a", "autoscaling": {"handoffPool": "p"}}}}}, "needs minReplicas"),
    ):
        with pytest.raises(helm_python.HelmError, match=complaint):
            render(values)
    for values in ({"modell": "m"}, {"pools": {"prefill": {"main": {"gpu": 2}}}}, {"poolDefaults": {"workerOptions": {"grace_s": 3}}}):
        with pytest.raises(helm_python.HelmError):
            render(SMALLEST | values)


def test_the_schema_knows_every_value() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())

    def unknown(values: Any, place: Any, path: str) -> Iterator[str]:
        if "$ref" in place:
            place = schema["$defs"][place["$ref"].rpartition("/")[2]]
        if not isinstance(values, dict) or "properties" not in place:
            return
        for key in values.keys() ^ place["properties"].keys() - {"global"}:
            yield f"{path}.{key}"
        for key in values.keys() & place["properties"].keys():
            yield from unknown(values[key], place["properties"][key], f"{path}.{key}")

    assert list(unknown(yaml.safe_load((CHART / "values.yaml").read_text()), schema, "values")) == []


# ---------------------------------------------------------------------------- scaling


def scaled(values: dict[str, Any]) -> dict[str, Object]:
    return {found["metadata"]["name"]: found["spec"] for found in render(values) if found["kind"] == "ScaledObject"}


def test_triggers_name_what_the_code_declares() -> None:
    declared = {(spec.stream, spec.durable) for spec in streams.ROUTER_CONSUMERS}
    pool = {"handoffPool": "org_model-1a2b3c4d", "enabled": True}
    near = {"domain": "rack-a", "autoscaling": pool | {"minReplicas": 1}}
    own_pool = AUTOSCALED | {"pools": {"decode": {"main": {"autoscaling": pool}, "rack-a": near}}}
    tokens = [domain_token(domain) for domain in ("", near["domain"])]
    declared |= {("JW_HANDOFF", streams.decode_consumer(pool["handoffPool"], token).durable) for token in tokens}
    seen = set[tuple[str, str]]()
    for spec in [*scaled(AUTOSCALED).values(), *scaled(own_pool).values()]:
        for trigger in spec["triggers"]:
            if trigger["type"] == "nats-jetstream":
                seen.add((trigger["metadata"]["stream"], trigger["metadata"]["consumer"]))
    assert seen == declared


def test_every_pool_wakes_on_requests_and_stays_for_work_in_hand() -> None:
    for name, spec in scaled(AUTOSCALED).items():
        assert spec["minReplicaCount"] == 0
        kinds = [trigger["type"] for trigger in spec["triggers"]]
        assert kinds == ["nats-jetstream", "nats-jetstream", "metrics-api"]
        lags = [int(trigger["metadata"]["lagThreshold"]) for trigger in spec["triggers"][:2]]
        assert lags == ([1_000_000] * 2 if "decode" in name else [4] * 2)  # decode workers are only woken by them
    deployments = [found for found in render(AUTOSCALED) if found["kind"] == "Deployment" and "worker" in str(found["metadata"]["labels"])]
    assert all("replicas" not in found["spec"] for found in deployments)  # or an upgrade would undo the scaling


def test_pools_of_one_role_share_what_waits() -> None:
    two = AUTOSCALED | {"pools": {"prefill": {"main": {}, "more": {}}}}
    prefill = [spec for name, spec in scaled(two).items() if "prefill" in name]
    assert [[trigger["metadata"].get("lagThreshold") for trigger in spec["triggers"][:2]] for spec in prefill] == [["8", "8"]] * 2
    assert [spec["triggers"][2]["metadata"]["targetValue"] for spec in prefill] == ["4", "4"]


def value_at(document: Any, path: str) -> Any:
    """As GJSON reads the paths that the chart writes: keys, numbers, and `#(key=="value")`."""
    for key, query, value in re.findall(r'(?:#\((\w+)=="([^"]*)"\)|(\w+))', path):
        document = next(item for item in document if item[key] == query) if key else document[int(value) if value.isdigit() else value]
    return document


async def test_the_path_to_work_in_hand_is_right(tmp_path: Path) -> None:
    async with NatsServer(tmp_path, sync_always=False, extra_config='http: "127.0.0.1:-1"') as server:
        monitoring = re.findall(r"Starting http monitor on (\S+)", server.log_file.read_text())[-1]
        async with Bus.connect(BrokerSettings(url=server.url), "t") as bus:
            await ensure_topology(bus, TopologySettings())
            for number in range(3):
                await bus.request(f"jw.prefill.lane-{number}", b"job")
        paths = {
            trigger["metadata"]["valueLocation"]: trigger["metadata"]["url"]
            for spec in scaled(AUTOSCALED).values()
            for trigger in spec["triggers"][2:]
        }
        assert len(paths) == 2
        found = {}
        for path, url in paths.items():
            answer = await asyncio.to_thread(urllib.request.urlopen, url.replace("nats.nats.svc:8222", monitoring))
            found[re.findall(r"JW_\w+", path)[0]] = value_at(json.loads(answer.read()), path)
        assert found == {"JW_PREFILL": 3, "JW_HANDOFF": 0}


# ---------------------------------------------------------------------------- a broker of its own


@pytest.mark.parametrize("replicas", [1, 3])
def test_its_own_broker_is_configured_as_the_embedded_one(replicas: int, tmp_path: Path) -> None:
    objects = render({"model": "m", "nats": {"own": {"enabled": True, "replicas": replicas}}})
    (text,) = [found["data"]["nats.conf"] for found in objects if found["kind"] == "ConfigMap"]
    file = tmp_path / "nats.conf"
    file.write_text(text)
    done = subprocess.run([find_binary(), "-t", "-c", str(file)], capture_output=True, text=True, env={"POD_NAME": "jw-nats-0"})
    assert done.returncode == 0, done.stderr
    compose = (HELM.parent / "compose" / "nats.conf").read_text()  # which is tested to be as the embedded one
    settings = r"^\s*(max_payload|max_file_store|max_memory_store|max_buffered_\w+|sync_interval):\s*(\S+)"
    assert dict(re.findall(settings, text, re.MULTILINE)) == dict(re.findall(settings, compose, re.MULTILINE))
    assert text.count("-peers:6222") == (replicas if replicas > 1 else 0)
    (stateful,) = [found for found in objects if found["kind"] == "StatefulSet" and found["metadata"]["name"].endswith("-nats")]
    assert (
        container(stateful["spec"]["template"])["image"]
        == yaml.safe_load((HELM.parent / "compose/compose.yaml").read_text())["services"]["nats"]["image"]
    )
    limits = {variable["name"]: variable.get("value") for variable in container(next(pods(objects))[1])["env"]}
    assert limits["JETWAKE_LIMITS_REPLICAS"] == str(replicas)


def test_every_value_is_documented() -> None:
    assert write_chart_values.FILE.read_text() == write_chart_values.text(), "run: python -m tests.deploy.write_chart_values"
