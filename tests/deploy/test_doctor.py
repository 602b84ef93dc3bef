"""Each kind of fault that can be made on this machine is really made, and the doctor finds it and says what mends it."""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jetwake.deploy.doctor import machine
from jetwake.deploy.doctor.broker import broker_findings, clock_offset, version
from jetwake.deploy.doctor.finding import Finding, is_wrong
from jetwake.deploy.doctor.model_files import model_files
from jetwake.deploy.doctor.run import Examined, checks_of
from jetwake.deploy.doctor.transfer import nixl_transfer
from jetwake.deploy.nats_server import NatsServer
from jetwake.pipeline.connection import Bus
from jetwake.pipeline.publish import Publisher
from jetwake.pipeline.registry import CardKeeper
from jetwake.pipeline.reserved_port import ReservedPort
from jetwake.pipeline.settings import BrokerSettings, TopologySettings
from jetwake.schemas.workers import KvCompatibility, WorkerCard

ACCOUNT = "accounts {{ A {{ {jetstream} users: [{{user: a, password: a}}] }} }}"


async def of_broker(url: str, role: str = "", topology: TopologySettings | None = None, monitor_port: int = 1) -> dict[str, Finding]:
    found = await broker_findings(BrokerSettings(url=url), topology or TopologySettings(), role, monitor_port)
    return {finding.what: finding for finding in found}


def in_a_process(*words: str, prefix: str = "", **variables: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Of `jetwake doctor`: its exit code, and what it found."""
    line = f"{prefix} exec {sys.executable} -m jetwake.deploy.cli doctor --json {' '.join(words)}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, env={**os.environ, **variables}, timeout=120)
    assert done.stdout, done.stderr
    return done.returncode, {finding["what"]: finding for finding in json.loads(done.stdout)["findings"]}


def card(port: int) -> WorkerCard:
    same = KvCompatibility(
        engine="e", engine_version="1", nixl_version="1", model="m", revision="", dtype="d", kv_dtype="d", block_size_tokens=16,
        tensor_parallel=1, kv_layout="",
    )  # fmt: skip
    return WorkerCard(
        worker="w1", incarnation="i1", role="prefill", model="m", pool="p", compatibility=same, capacity_blocks=1, capacity_slots=1,
        max_model_len_tokens=100, side_channel_host="127.0.0.1", side_channel_port=port,
    )  # fmt: skip


async def test_a_well_set_up_broker(nats_server: NatsServer) -> None:
    found = await of_broker(nats_server.url)
    assert not is_wrong(found.values()), found
    assert {found[what].state for what in ("broker", "payload", "JetStream", "streams", "clock")} == {"ok"}
    assert found["sync to disk"].state == "skipped"
    assert re.search(r"nats-server 2\.\d+\.\d+ at nats://127", found["broker"].found)
    assert (version((2, 10, 29), "nats://me:hush@x").state, version((3, 0, 0), "").state) == ("wrong", "ok")
    assert "hush" not in version((2, 10, 29), "nats://me:hush@x").found


async def test_nobody_there_and_exit_code_1() -> None:
    with ReservedPort() as nobody:
        code, found = await asyncio.to_thread(in_a_process, "--role", "client", "--nats-url", f"nats://127.0.0.1:{nobody.port}")
    assert (code, found["broker"]["state"]) == (1, "wrong")
    assert found["broker"]["cure"]
    assert "NIXL" not in found


async def test_wrong_password(tmp_path: Path) -> None:
    async with NatsServer(tmp_path, extra_config="authorization { user: a, password: b }") as server:
        found = await of_broker(server.url)
    assert found["broker"].state == "wrong"
    assert "credentials" in found["broker"].found


async def test_an_account_without_jetstream_and_one_with_too_little(tmp_path: Path) -> None:
    for name, jetstream, words in (("off", "", "off"), ("small", "jetstream: {max_file: 100MB, max_mem: 1GB},", "storage 0.10 GiB")):
        async with NatsServer(tmp_path / name, extra_config=ACCOUNT.format(jetstream=jetstream)) as server:
            found = await of_broker(server.url.replace("//", "//a:a@"))
        assert found["JetStream"].state == "wrong"
        assert words in found["JetStream"].found


async def test_little_payload_rare_syncs_and_no_streams_yet(tmp_path: Path) -> None:
    reserved = ReservedPort()
    port = reserved.port
    extra = f'http: "127.0.0.1:{port}"'
    async with NatsServer(tmp_path, extra_config=extra, sync_always=False, max_payload_bytes=512 << 10) as server:
        found = await of_broker(server.url, monitor_port=port)
    assert (found["payload"].state, found["sync to disk"].state, found["streams"].state) == ("wrong", "warning", "warning")
    async with NatsServer(tmp_path / "b", extra_config=extra) as server:
        found = await of_broker(server.url, monitor_port=port)
    assert (found["payload"].state, found["sync to disk"].state) == ("ok", "ok")
    reserved.free()


async def test_streams_that_are_not_as_configured(nats_server: NatsServer) -> None:
    found = await of_broker(nats_server.url, topology=TopologySettings(max_requests=7))
    assert found["streams"].state == "wrong"
    assert "max_msgs is 20000, declared 7" in found["streams"].found


async def test_a_worker_that_nobody_reaches(own_server: NatsServer) -> None:
    async with Bus.connect(BrokerSettings(url=own_server.url), "test") as bus:
        keeper = CardKeeper(bus, Publisher(bus))
        with ReservedPort() as nobody:
            await keeper.announce(card(nobody.port))
            assert (await of_broker(own_server.url, "decode"))["workers"].state == "wrong"
        assert "workers" not in await of_broker(own_server.url, "gateway")
        listening = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        await keeper.announce(card(listening.sockets[0].getsockname()[1]))
        assert (await of_broker(own_server.url, "decode"))["workers"].state == "ok"
        listening.close()


async def test_few_open_files(nats_server: NatsServer) -> None:
    words = ("--role", "client", "--nats-url", nats_server.url)
    code, found = await asyncio.to_thread(in_a_process, *words, prefix="ulimit -n 200;")
    assert (code, found["open files"]["state"]) == (1, "wrong")


def test_little_shared_memory_and_a_full_disk(tmp_path: Path) -> None:
    mounted = f"unshare --mount bash -c 'mount -t tmpfs -o size=8m none /dev/shm && mount -t tmpfs -o size=32m none {tmp_path} && "
    if subprocess.run(["bash", "-c", mounted + "true'"], capture_output=True).returncode:
        pytest.skip("mounting needs root and a name space of its own")
    script = "from jetwake.deploy.doctor import machine as m; from pathlib import Path; import sys; " + (
        "print(m.shared_memory().state, m.disk(Path(sys.argv[1]), 0).state)"
    )
    done = subprocess.run(["bash", "-c", f'{mounted}{sys.executable} -c "{script}" {tmp_path}\''], capture_output=True, text=True)
    assert done.stdout.split() == ["wrong", "wrong"], done.stderr
    assert machine.disk(tmp_path, 1 << 60).state == "warning"


def test_a_nats_server_that_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "nats-server"
    broken.write_text("#!/bin/sh\necho wrong architecture >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    finding = machine.nats_server()
    assert (finding.state, "wrong architecture" in finding.found) == ("wrong", True), finding


def test_packages_that_are_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.requirements().state == "ok"
    information = tmp_path / "nats_py-2.0.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: nats-py\nVersion: 2.0.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert (machine.requirements().state, machine.lock().state) == ("wrong", "warning")
    assert "nats-py 2.0.0" in machine.requirements().found
    assert "nats-py 2.0.0" in machine.lock().found


def test_nixl_works_breaks_and_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nixl")
    assert nixl_transfer().state == "ok"
    monkeypatch.setenv("UCX_TLS", "nothing-of-this-name")
    broken = nixl_transfer()
    assert (broken.state, "UCX" in broken.found) == ("wrong", True)
    (tmp_path / "nixl.py").write_text("raise ImportError('libucp.so.0: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    missing = nixl_transfer()
    assert (missing.state, "libucp" in missing.found, "pip install" in missing.cure) == ("wrong", True, True)


def test_gpus_that_torch_or_the_driver_cannot_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi"):
        pytest.skip("here are GPUs")
    assert machine.gpus().state == "ok"
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H100 (UUID: GPU-1)'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = machine.gpus()
    assert (found.state, "H100" in found.found, "torch" in found.found) == ("wrong", True, True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert machine.gpus().state == "warning"
    smi.write_text("#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'\nexit 18\n")
    assert "mismatch" in machine.gpus().found


def test_model_folders(tmp_path: Path) -> None:
    assert model_files(str(tmp_path / "nowhere")).state == "wrong"
    assert "config.json is missing" in model_files(str(tmp_path)).found
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model-1.safetensors").write_bytes(bytes(5000))
    assert "model-2.safetensors is missing" in model_files(str(tmp_path)).found
    (tmp_path / "model-2.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    assert "git-lfs" in model_files(str(tmp_path)).found
    (tmp_path / "model-2.safetensors").write_bytes(bytes(5000))
    assert model_files(str(tmp_path)).state == "ok"


def test_roles_need_different_things() -> None:
    def of(role: str) -> set[str]:
        return {getattr(check, "__name__", "") for check in checks_of(Examined(role, None, TopologySettings()))}

    assert "nixl_transfer" in of("decode") & of("up") & of("")
    assert not {"nixl_transfer", "nats_server", "gpus"} & of("router")


def test_clocks_apart() -> None:
    assert (clock_offset(0.1).state, clock_offset(-3.0).state, clock_offset(3.0).state) == ("ok", "warning", "warning")
