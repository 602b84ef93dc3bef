"""One file, the environment and flags, over the defaults: who wins, what is refused, and that real processes go by it."""

import asyncio
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from jetwake.deploy.cli import app
from jetwake.deploy.cli.configured import FLAGS, PAIRS, setting_of
from jetwake.deploy.configuration import BY_NAME, SECTIONS, Configuration, load, variable
from jetwake.deploy.configuration_view import MASK, reference_page
from jetwake.deploy.nats_server import NatsServer
from jetwake.pipeline.connection import Bus
from jetwake.pipeline.registry import Registry
from jetwake.pipeline.settings import BrokerSettings
from jetwake.schemas.errors import SetupError

ROOT = Path(__file__).parents[2]
VARIABLE = re.compile(r'"(_?JETWAKE_[A-Z_]+)"')
ONLY_OF_ONE_RUN = {"broker", "config", "context", "health_file"}


@pytest.fixture(autouse=True)
def _nothing_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("JETWAKE_") and name != "JETWAKE_STATE_DIR"]:
        monkeypatch.delenv(name)


def show(*words: str) -> dict[str, dict[str, Any]]:
    result = CliRunner().invoke(app, ["config", "show", "--json", *words])
    assert result.exit_code == 0, result.output
    return {row["key"]: row for row in json.loads(result.stdout)["settings"]}


def write(text: str, name: str = "jetwake.toml") -> Path:
    path = Path(name)
    path.write_text(text)
    return path


def test_the_page_tells_of_every_setting() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text() == reference_page(), "run: jetwake config reference > docs/configuration.md"
    undescribed = [
        f"{section.name}.{key}" for section in SECTIONS for key in section.keys if not section.model.model_fields[key].description
    ]
    assert not undescribed


def test_flag_over_environment_over_file_over_default(monkeypatch: pytest.MonkeyPatch) -> None:
    write("[router]\nslots = 1\nhold_s = 1.5\nlead = 1\npolicy = 'random'\n")
    monkeypatch.setenv("JETWAKE_ROUTER_SLOTS", "2")
    monkeypatch.setenv("JETWAKE_ROUTER_LEAD", "2")
    monkeypatch.setenv("JETWAKE_VLLM_ENGINE_ARGS", '{"seed": 7}')
    rows = show("--", "router", "--policy", "round_robin", "--router-option", "slots=3")
    seen = {key: (rows[key]["value"], rows[key]["source"]) for key in rows if rows[key]["origin"] != "default"}
    assert seen == {
        "router.slots": (3, "--router-option"),
        "router.lead": (2.0, "JETWAKE_ROUTER_LEAD"),
        "router.hold_s": (1.5, "jetwake.toml"),
        "router.policy": ("round_robin", "--policy"),
        "vllm.engine_args": ({"seed": 7}, "JETWAKE_VLLM_ENGINE_ARGS"),
    }


def test_yaml_by_name_and_by_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    write("[router]\nslots = 1\n")
    write("router:\n  slots: 2\nup:\n", "a.yaml")
    write("router: {slots: 3}", "b.yml")
    assert show()["router.slots"]["value"] == 1
    monkeypatch.setenv("JETWAKE_CONFIG", "a.yaml")
    assert show()["router.slots"]["value"] == 2
    assert show("--config", "b.yml")["router.slots"]["value"] == 3
    assert show("--config", "b.yml", "--", "router", "--name", "r9")["router.slots"]["value"] == 3


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[routr]\nslots = 1", "there is no section routr; is router meant?"),
        ("[router]\npolcy = 'random'", "router.polcy is not known; is router.policy meant?"),
        ("[router]\nnum_blocks = 3", "router.num_blocks is not known; is simulated.num_blocks meant?"),
        ("[router]\nslots = 0", "router.slots: Input should be greater than or equal to 1"),
        ("[worker]\nrole = 'decode'", "worker.role cannot be set"),
        ("[vllm]\ngpu_memory_utilization = 0.5", "options of vLLM itself go into vllm.engine_args"),
        ("[vllm.engine_args]\nkv_transfer_config = 1", "engine_args may not set kv_transfer_config"),
        ("slots = 1", "there is no section slots"),
        ("router = 1", "router is a section"),
        ("[router\n", "jetwake.toml: "),
    ],
)
def test_what_is_not_known_is_refused_everywhere(text: str, complaint: str) -> None:
    write(text)
    checked = CliRunner().invoke(app, ["config", "check", "jetwake.toml"])
    assert (checked.exit_code, complaint in checked.stderr) == (2, True), checked.output
    run = CliRunner().invoke(app, ["router"])
    assert (run.exit_code, complaint in run.stderr) == (2, True), run.output


def test_variables_are_refused_by_their_own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JETWAKE_ROUTER_POLCY", "random")
    with pytest.raises(SetupError, match="JETWAKE_ROUTER_POLCY is not known; is JETWAKE_ROUTER_POLICY meant"):
        load(None)
    monkeypatch.delenv("JETWAKE_ROUTER_POLCY")
    monkeypatch.setenv("JETWAKE_LIMITS", "max_requests=5")
    with pytest.raises(SetupError, match="JETWAKE_LIMITS is no setting by itself"):
        load(None)


def test_what_processes_tell_each_other_is_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that runs an engine in itself passes the engine's variables on to every `jetwake` that it starts."""
    folders = ("schemas", "pipeline", "producers", "consumers", "deploy")
    named = {name for folder in folders for path in (ROOT / folder).rglob("*.py") for name in VARIABLE.findall(path.read_text())}
    for name in named - {"JETWAKE_CONFIG"}:
        if name not in {variable(section.name, key) for section in SECTIONS for key in section.keys}:
            monkeypatch.setenv(name, "1")
    assert {"_JETWAKE_ENGINE_ID", "_JETWAKE_PARENT_PID", "JETWAKE_STATE_DIR"} <= os.environ.keys()
    assert not any(load(None).section(section.name) for section in SECTIONS)


def test_what_kubernetes_says_of_services_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "GATEWAY_PORT": "tcp://10.0.0.1:8000",
        "GATEWAY_SERVICE_HOST": "10.0.0.1",
        "GATEWAY_SERVICE_PORT_HTTP": "8000",
        "GATEWAY_PORT_8000_TCP_ADDR": "10.0.0.1",
        "NATS_HEADLESS_SERVICE_PORT": "4222",
        "NATS_URL": "nats://10.0.0.2",
    }.items():
        monkeypatch.setenv(f"JETWAKE_{name}", value)
    configuration = load(None)
    assert (configuration.section("gateway"), configuration.section("nats")) == ({}, {"url": "nats://10.0.0.2"})


def test_secrets_are_not_shown() -> None:
    write('[nats]\nurl = "nats://me:hush@a:1,nats://b:2"\n[vllm]\nenvironment_variables = {HF_TOKEN = "hush", A = "b"}\n')
    rows = show()
    assert rows["nats.url"]["value"] == f"nats://{MASK}@a:1,nats://b:2"
    assert rows["vllm.environment_variables"]["value"] == {"HF_TOKEN": MASK, "A": "b"}
    assert "hush" not in CliRunner().invoke(app, ["config", "show"]).output


def test_every_flag_of_a_role_is_a_setting_with_the_same_default() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for command, settings in FLAGS.items():
        parameters = {parameter.name: parameter for parameter in commands[command].params}
        assert not settings.keys() - parameters.keys()
        for name, parameter in parameters.items():
            if name in PAIRS or (name in ONLY_OF_ONE_RUN) or (command == "demo" and name == "prompt"):
                continue
            setting = setting_of(command, name)
            assert setting is not None, f"{command} --{name}: which setting is it? (deploy/cli/configured.py)"
            section, _, key = setting.partition(".")
            field = BY_NAME[section].model.model_fields[key]
            assert field.is_required() or parameter.default in (field.default, None), f"{command} --{name}"


async def test_a_worker_goes_by_file_environment_and_flags(own_server: NatsServer, tmp_path: Path) -> None:
    write(f'[nats]\nurl = "{own_server.url}"\n[engine]\nkind = "simulated"\nmodel = "m"\n[worker]\ndomain = "rack-1"\nname = "from-file"\n')
    variables = {"JETWAKE_WORKER_NAME": "from-environment", "JETWAKE_SIMULATED_BLOCK_SIZE_TOKENS": "64", "JETWAKE_ENGINE_MODEL": "n"}
    words = ["aggregated", "--served-model-name", "from-flag", "--engine-option", "num_blocks=99"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "jetwake.deploy.cli", *words, env={**os.environ, **variables}, cwd=tmp_path
    )
    try:
        async with Bus.connect(BrokerSettings(url=own_server.url), "test") as bus:
            registry = Registry(bus)
            await registry.start()
            following = asyncio.create_task(registry.run())
            await registry.wait_for(bool, timeout_s=60.0)
            following.cancel()
            (card,) = registry.workers.values()
    finally:
        process.terminate()
        await process.wait()
    assert (card.worker, card.domain, card.compatibility.model) == ("from-environment", "rack-1", "from-flag")
    assert (card.compatibility.block_size_tokens, card.capacity_blocks) == (64, 99)
    assert process.returncode == 0


def test_no_configuration_says_nothing() -> None:
    assert load(None) == Configuration()
