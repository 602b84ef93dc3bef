"""`jetwake` as a person or a script uses it: real processes, with the simulated engine."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from jetwake.deploy.local import locked_store

JETWAKE = (sys.executable, "-m", "jetwake.deploy.cli")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "JETWAKE_STATE_DIR": str(tmp_path / "state")}


def jetwake(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*JETWAKE, *arguments], env=environment, capture_output=True, text=True, timeout=60, check=False)


async def ajetwake(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(jetwake, environment, *arguments)


@asynccontextmanager
async def up(environment: dict[str, str], *arguments: str) -> AsyncGenerator[asyncio.subprocess.Process]:
    """Yields when it has said `ready`."""
    process = await asyncio.create_subprocess_exec(
        *JETWAKE, "up", "--engine", "simulated", "--model", "sim", *arguments,
        env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            assert (await process.stdout.readline()).decode().startswith("ready")
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def descendants(process: asyncio.subprocess.Process) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


async def all_gone(processes: list[psutil.Process]) -> None:
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, 20)
    assert not alive


async def test_a_system_whose_progress_nobody_reads_any_more_starts_and_ends(environment: dict[str, str]) -> None:
    """As behind `2>&1 | head -2`: the reader leaves amid the starts of others."""
    read, write = os.pipe()
    process = await asyncio.create_subprocess_exec(
        *JETWAKE, "demo", "--engine", "simulated", "--model", "sim", env=environment, stdout=asyncio.subprocess.PIPE, stderr=write
    )
    os.close(write)
    try:
        with os.fdopen(read) as reader:
            assert (await asyncio.to_thread(reader.readline)).startswith("router-1:")
        async with asyncio.timeout(60):
            said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
    assert process.returncode == 0
    assert said.startswith(b"\n> What is the capital of France?")


async def test_a_system_that_starts_leaves_the_folders_of_benchmarks_and_chaos_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They hold the stores of brokers that may be running for minutes."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    others = [Path(tempfile.mkdtemp(prefix=f"jetwake-{kind}-")) for kind in ("bench", "chaos", "load")]
    for folder in others:
        os.utime(folder, (0, 0))
    async with locked_store(None) as store:
        assert store.parent == tmp_path
        assert all(folder.is_dir() for folder in others)


@pytest.mark.skipif(sys.platform != "linux", reason="the batch policy is Linux's")
async def test_the_processes_of_a_local_system_do_not_interrupt_each_other(environment: dict[str, str]) -> None:
    """The broker, the router and the workers, with the threads that NIXL and the broker started."""
    async with up(environment) as process:
        threads = [(child.name(), thread.id) for child in descendants(process) for thread in child.threads()]
        assert len({name for name, _ in threads}) == 2
        assert {os.sched_getscheduler(thread) for _, thread in threads} == {os.SCHED_BATCH}


@pytest.mark.skipif(sys.platform != "linux", reason="policies are Linux's")
@pytest.mark.parametrize(("given", "then"), [("SCHED_OTHER", "SCHED_BATCH"), ("SCHED_IDLE", "SCHED_IDLE")])
def test_a_policy_that_somebody_chose_stays(given: str, then: str) -> None:
    script = (
        "import os; from jetwake.deploy.shared_cores import share_cores; "
        f"os.sched_setscheduler(0, os.{given}, os.sched_param(0)); share_cores(); assert os.sched_getscheduler(0) == os.{then}"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


async def test_ask_and_status_answer_as_documented_and_ctrl_c_leaves_nothing(environment: dict[str, str]) -> None:
    async with up(environment, "--prefill", "1", "--decode", "1") as process:
        asked = await ajetwake(environment, "ask", "hello", "--max-tokens", "5", "--temperature", "0", "--json")
        assert asked.returncode == 0, asked.stderr
        answer: dict[str, Any] = json.loads(asked.stdout)
        assert set(answer) >= {
            "request_id", "text", "token_ids", "finish_reason", "prompt_tokens", "cached_tokens", "prefill_worker",
            "decode_worker", "kv_bytes", "ttft_ms", "total_ms", "attempts",
        }  # fmt: skip
        assert (answer["prefill_worker"], answer["decode_worker"], len(answer["token_ids"])) == ("prefill-1", "decode-1", 5)
        assert answer["kv_bytes"] > 0

        shown = await ajetwake(environment, "ask", "hello", "--max-tokens", "5", "--temperature", "0")
        assert answer["text"] in shown.stdout
        assert "prefill prefill-1 -> decode decode-1" in shown.stdout

        status = json.loads((await ajetwake(environment, "status", "--json")).stdout)
        assert {worker["worker"]: worker["role"] for worker in status["workers"]} == {"prefill-1": "prefill", "decode-1": "decode"}
        assert all(queue == {"pending": 0, "in_progress": 0} for queue in status["queues"].values())
        assert "decode-1" in (await ajetwake(environment, "status")).stdout

        family = descendants(process)
        assert len(family) == 4  # broker, router, two workers
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(30):
            assert await process.wait() == 0
        await all_gone(family)
    assert not (Path(environment["JETWAKE_STATE_DIR"]) / "up.json").exists()


async def test_a_worker_that_dies_is_replaced_and_serves_again(environment: dict[str, str]) -> None:
    async with up(environment, "--prefill", "1", "--decode", "1") as process:
        for role in ("prefill", "decode"):
            [victim] = [child for child in descendants(process) if role in child.cmdline()]
            victim.kill()
            asked = await ajetwake(environment, "ask", "again", "--max-tokens", "3", "--json", "--timeout-s", "50")
            assert asked.returncode == 0, asked.stderr


async def test_nothing_outlives_an_up_that_is_killed(environment: dict[str, str]) -> None:
    async with up(environment, "--prefill", "1", "--decode", "1") as process:
        family = descendants(process)
        process.kill()
        await all_gone(family)


async def test_an_aggregated_worker_alone_serves(environment: dict[str, str]) -> None:
    async with up(environment, "--prefill", "0", "--decode", "0", "--aggregated", "1"):
        answer = json.loads((await ajetwake(environment, "ask", "hello", "--max-tokens", "3", "--json")).stdout)
        assert (answer["prefill_worker"], answer["decode_worker"], answer["kv_bytes"]) == ("aggregated-1", "aggregated-1", 0)


async def test_a_failed_request_exits_1_a_refused_one_2(environment: dict[str, str]) -> None:
    async with up(
        environment, "--prefill", "1", "--decode", "1", "--engine-option", "max_model_len_tokens=100", "--engine-option", "num_blocks=5"
    ):
        too_long = await ajetwake(environment, "ask", "x" * 200)
        assert (too_long.returncode, "100 tokens" in too_long.stderr) == (2, True)
        unknown = await ajetwake(environment, "ask", "x", "--model", "nope")
        assert (unknown.returncode, "'nope'" in unknown.stderr) == (2, True)
        no_room = await ajetwake(environment, "ask", "x", "--max-tokens", "90")  # which is more than 5 blocks of 16 tokens
        assert (no_room.returncode, "engine_refused" in no_room.stderr) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("ask", "x"), 3, "start `jetwake up`"),
        (("status", "--nats-url", "nats://127.0.0.1:1"), 3, "127.0.0.1:1"),
        (("up", "--engine", "nope"), 2, "simulated"),
        (("up", "--policy", "nope"), 2, "least_loaded"),
        (("up", "--prefill", "1", "--decode", "0"), 2, "at least one"),
        (("up", "--engine", "simulated", "--engine-option", "slots"), 2, "KEY=VALUE"),
        (("up", "--engine", "simulated", "--engine-option", "slotz=3"), 2, "slotz"),
        (("up", "--nonsense"), 2, "nonsense"),
        (("model", "fetch", "/no/such/folder"), 2, "/no/such/folder"),
    ],
)
def test_bad_usage_is_told_in_one_line(environment: dict[str, str], arguments: tuple[str, ...], code: int, words: str) -> None:
    done = jetwake(environment, *arguments)
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr


async def test_two_systems_cannot_share_a_store(environment: dict[str, str], tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    async with up(environment, "--aggregated", "1", "--prefill", "0", "--decode", "0", "--store", store):
        second = await ajetwake(environment, "up", "--engine", "simulated", "--store", store)
        assert (second.returncode, "--store" in second.stderr) == (2, True)


def test_help_imports_nothing_heavy() -> None:
    code = "import sys; from jetwake.deploy.cli import app; heavy = {'torch', 'vllm', 'nixl', 'nats', 'numpy'} & set(sys.modules); assert not heavy, heavy"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
