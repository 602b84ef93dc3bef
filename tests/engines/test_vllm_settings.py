"""What is refused before anything is loaded: wrong options, addresses nobody can reach, models that are not there."""

import json
import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from jetwake.consumers.engine_vllm.engine import VllmEngine
from jetwake.consumers.engine_vllm.facts import weights_digest
from jetwake.consumers.engine_vllm.settings import VllmSettings, engine_arguments, environment, unknown_arguments
from jetwake.deploy.demo_model import MANIFEST, fetch
from jetwake.schemas.errors import SetupError


def test_unknown_key() -> None:
    with pytest.raises(ValidationError, match="blocksize"):
        VllmSettings.model_validate({"model": "m", "blocksize": 32})


@pytest.mark.parametrize("name", ["block_size", "kv_transfer_config", "worker_extension_cls", "logits_processors"])
def test_own_options_are_not_for_users(name: str) -> None:
    with pytest.raises(ValidationError, match=name):
        VllmSettings(model="m", engine_args={name: 1})


def test_unknown_engine_option() -> None:
    with pytest.raises(SetupError, match="no engine option gpu_memory_utilisation"):
        unknown_arguments({"gpu_memory_utilisation": 1, "model": "m"}, frozenset({"model"}))


@pytest.mark.parametrize("host", ["", "127.0.0.1", "0.0.0.0", "localhost", "no-such-host.invalid"])
def test_address_that_nobody_can_reach(host: str) -> None:
    assert VllmSettings(model="m", side_channel_host=host).side_channel_host == host
    with pytest.raises(ValidationError, match="cannot be reached"):
        VllmSettings(model="m", side_channel_host=host, require_routable_host=True)


def test_only_a_cpu_gets_cpu_variables() -> None:
    assert environment(VllmSettings(model="m"), 1)["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert not [name for name in environment(VllmSettings(model="m", device="cuda"), 1) if "CPU" in name or "OMP" in name]


def test_failed_pulls_are_told() -> None:
    transfer = engine_arguments(VllmSettings(model="m", kv_lease_s=7), "id")["kv_transfer_config"]
    assert transfer["kv_load_failure_policy"] == "fail"
    assert transfer["kv_connector_extra_config"] == {"num_threads": 0, "kv_lease_duration": 7}


def test_nothing_happens_before_start() -> None:
    before = dict(os.environ)
    VllmEngine(VllmSettings(model="m"))
    assert dict(os.environ) == before


def test_other_weights_are_another_revision(tmp_path: Path) -> None:
    digests: set[str] = set()
    for name, weights in (("a", b"\0" * 4_000_000), ("b", b"\0" * 3_999_999 + b"\1"), ("c", b"\1" + b"\0" * 3_999_999)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"hidden_size": 1}))
        (folder / "model.safetensors").write_bytes(weights)
        digests.add(weights_digest(folder))
    assert len(digests) == 3


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/model", "~/nowhere", "a/b/c"])
def test_model_folder_that_is_not_there(name: str, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="no model folder"):
        fetch(name, tmp_path)


def test_other_models_are_left_alone(tmp_path: Path) -> None:
    assert fetch(str(tmp_path)) == tmp_path
    assert str(fetch("org/model", tmp_path)) == "org/model"


def test_tiny_model_is_the_same_everywhere_and_mended(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    one, two = fetch("tiny", tmp_path / "one"), fetch("tiny", tmp_path / "two")
    manifest = (one / MANIFEST).read_text()
    assert manifest == (two / MANIFEST).read_text()
    (one / "model.safetensors").write_bytes(b"half")
    assert (fetch("tiny", tmp_path / "one") / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()
