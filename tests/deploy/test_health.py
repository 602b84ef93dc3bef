"""`jetwake health` on real roles: what a probe sees while they start, work, lose the broker, stand still and end."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from jetwake.deploy.chaos.freezing import freeze, thaw
from jetwake.deploy.engines import make_engine
from jetwake.deploy.health import STALE_S, problem_of
from jetwake.deploy.nats_server import NatsServer
from jetwake.schemas.errors import SetupError

JETWAKE = [sys.executable, "-m", "jetwake.deploy.cli"]


@asynccontextmanager
async def role(url: str, file: Path, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *JETWAKE, *arguments, "--nats-url", url, "--health-file", str(file), stderr=asyncio.subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def probe(file: Path, *flags: str) -> tuple[int, str]:
    asked = await asyncio.create_subprocess_exec(*JETWAKE, "health", "--file", str(file), *flags, stdout=asyncio.subprocess.PIPE)
    said, _ = await asked.communicate()
    return asked.returncode or 0, said.decode()


def state(file: Path) -> str:
    return json.loads(file.read_text())["state"] if file.exists() else ""


async def until(fact: Callable[[], bool], timeout_s: float = 30.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not fact():
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("arguments", [("router",), ("prefill", "--engine", "simulated", "--model", "m")], ids=["router", "worker"])
async def test_a_probe_sees_what_is_so(own_server: NatsServer, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    file = tmp_path / "run" / "health.json"
    assert (await probe(file))[0] == 1
    async with role(own_server.url, file, *arguments) as process:
        await until(lambda: state(file) == "ready")
        assert await probe(file, "--ready") == (0, f"{arguments[0]}-1: ready\n")
        await own_server.stop()
        await until(lambda: state(file) == "cut off")
        assert (await probe(file, "--ready"))[0] == 1
        assert (await probe(file))[0] == 0  # a restart would mend nothing
        await own_server.start()
        await until(lambda: state(file) == "ready")
        await freeze(process.pid)
        facts = json.loads(file.read_text())
        file.write_text(json.dumps(facts | {"at_s": facts["at_s"] - STALE_S}))  # time passes, and nobody writes
        code, said = await probe(file)
        assert (code, "stands still" in said) == (1, True)
        thaw(process.pid)
        process.terminate()
        assert await process.wait() == 0
        assert not file.exists()


def test_what_is_well() -> None:
    def text(state: str) -> str:
        return json.dumps({"name": "w", "state": state, "reason": "because", "at_s": 100.0})

    assert [problem_of(text(state), 101.0, must_be_ready=False) for state in ("starting", "ready", "cut off", "draining")] == [""] * 4
    assert problem_of(text("stalled"), 101.0, must_be_ready=False) == "stalled: because"
    assert problem_of(text("draining"), 101.0, must_be_ready=True) == "draining: because"
    assert "cannot be read" in problem_of("{}", 101.0, must_be_ready=False)


def test_an_address_that_no_other_machine_reaches_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostbyname", lambda _: "127.0.1.1")
    with pytest.raises(SetupError, match="no other reaches"):
        make_engine("simulated", "m", "", {"side_channel_host": "auto"})
