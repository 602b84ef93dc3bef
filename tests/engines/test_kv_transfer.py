"""Moving blocks: between processes, from peers that die or freeze, and never into blocks that belong to somebody else."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import nixl
import pytest

from jetwake.consumers.engine import Leg, Peer
from jetwake.consumers.engine_simulated import SimulatedEngine, SimulatedSettings
from jetwake.consumers.kv_side_channel import Introduction, SideChannelServer, introduce
from jetwake.consumers.kv_transfer_nixl import NIXL_ERROR_NAMES, KvTransfer, Pull
from jetwake.deploy.chaos.freezing import freeze, thaw
from jetwake.schemas.decode import KvReference
from jetwake.schemas.errors import PullFailed
from jetwake.schemas.requests import Sampling
from jetwake.schemas.tokens import unpack_tokens

from .conformance import until
from .peer_process import prompt

SETTINGS = SimulatedSettings(vocabulary_size=1000, num_blocks=512, handshake_timeout_s=10.0)
PEER_PROCESS = Path(__file__).parent / "peer_process.py"
FROZEN_PULL = Path(__file__).parent / "frozen_pull.py"


class PeerProcess:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def _line(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(await self.process.stdout.readline())

    async def peer(self) -> Peer:
        return Peer(*(await self._line()))

    async def prefill(self, length: int, salt: int) -> Leg:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{length} {salt}\n".encode())
        first_tokens, kv = await self._line()
        sampling = Sampling(temperature=0.0, max_tokens=20)
        return Leg(f"{salt}", prompt(length, salt), sampling, "", "", bytes.fromhex(first_tokens), KvReference.model_validate_json(kv))


@pytest.fixture
async def peer_process() -> AsyncIterator[PeerProcess]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(PEER_PROCESS), SETTINGS.model_dump_json(exclude={"timing"}), stdin=pipe, stdout=pipe
    )
    yield PeerProcess(process)
    if process.returncode is None:
        process.kill()
    await process.wait()


@pytest.fixture
async def engine() -> AsyncIterator[SimulatedEngine]:
    engine = SimulatedEngine(SETTINGS)
    await engine.start()
    yield engine
    await engine.stop()


async def tokens_of(engine: SimulatedEngine, leg: Leg) -> list[int]:
    return [token async for output in engine.generate(leg) for token in unpack_tokens(output.tokens)]


async def test_between_processes(peer_process: PeerProcess, engine: SimulatedEngine) -> None:
    await engine.greet(await peer_process.peer())
    for salt in range(5):
        work = await peer_process.prefill(1000, salt)
        expected = await tokens_of(engine, Leg("alone", work.prompt_tokens, work.sampling))
        engine.pool.clear_cache()
        assert await tokens_of(engine, work) == expected
    assert engine.stats().counters["pulled_bytes"] == 5 * 63 * 512


async def test_killed_peer(
    peer_process: PeerProcess, engine: SimulatedEngine, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """With the handshake done before, and without."""
    await peer_process.peer()
    first, second = await peer_process.prefill(100, 1), await peer_process.prefill(100, 2)
    await tokens_of(engine, first)
    peer_process.process.kill()
    await peer_process.process.wait()
    for _ in range(2):
        with pytest.raises(PullFailed):
            await tokens_of(engine, second)
    assert engine.stats().used_blocks == 0
    assert await tokens_of(engine, Leg("alone", second.prompt_tokens, second.sampling))
    assert len("".join(capfd.readouterr()).splitlines()) + len(caplog.records) < 100


async def test_frozen_peer_at_the_handshake(peer_process: PeerProcess) -> None:
    engine = SimulatedEngine(SETTINGS.model_copy(update={"handshake_timeout_s": 0.3}))
    await engine.start()
    peer = await peer_process.peer()
    await freeze(peer_process.process.pid)
    greetings = await asyncio.gather(*(engine.greet(peer) for _ in range(5)), return_exceptions=True)
    assert [type(greeting) for greeting in greetings] == [PullFailed] * 5
    thaw(peer_process.process.pid)
    await engine.greet(peer)
    await engine.stop()


async def test_frozen_peer_in_the_middle_of_a_pull() -> None:
    """Over TCP, where a read needs the other process. The transport is chosen when UCX loads, so this runs in processes of its own."""
    environment = os.environ | {"UCX_TLS": "tcp,self"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(FROZEN_PULL), str(PEER_PROCESS), SETTINGS.model_dump_json(exclude={"timing"}), env=environment
    )
    assert await process.wait() == 0


class FakeAgent:
    """A transfer whose status the test sets."""

    def __init__(self, status: object) -> None:
        self.status = status
        self.releases = 0

    def getXferStatus(self, handle: int) -> object:  # noqa: N802
        if isinstance(self.status, Exception):
            raise self.status
        return self.status

    def releaseXferReq(self, handle: int) -> None:  # noqa: N802
        self.releases += 1


class FakeNixl:
    done, in_progress, errors = "done", "going on", (ConnectionError,)


def fake_pull(status: object) -> tuple[Pull, FakeAgent]:
    agent = FakeAgent(status)
    return Pull(FakeNixl(), agent, 1, 4096, status), agent  # type: ignore[arg-type]


async def test_given_up_blocks_are_not_free_before_they_are_settled() -> None:
    pull, agent = fake_pull("going on")
    with pytest.raises(PullFailed, match="did not arrive"):
        await pull.wait(timeout_s=0.01)
    freed: list[str] = []
    pull.when_settled(lambda: freed.append("late"))
    assert not pull.poll()
    assert not freed
    agent.status = "done"
    assert pull.poll()
    assert (freed, agent.releases) == (["late"], 1)
    pull.when_settled(lambda: freed.append("at once"))
    assert freed == ["late", "at once"]


@pytest.mark.parametrize("end", ["broken", ConnectionError("gone")])
async def test_failed_transfer(end: object) -> None:
    pull, agent = fake_pull("going on")
    waiting = asyncio.create_task(pull.wait(timeout_s=60))
    await asyncio.sleep(0)
    agent.status = end
    with pytest.raises(PullFailed, match=r"broken|gone"):
        await waiting
    assert pull.settled


async def test_bytes_are_those_of_the_blocks_moved() -> None:
    pull, _ = fake_pull("done")
    assert await pull.wait(timeout_s=0) == 4096


async def test_stopping_settles_what_is_open() -> None:
    pull, agent = fake_pull("going on")
    pull.abandon()
    pull.abandon()
    assert (pull.settled, agent.releases) == (True, 1)
    with pytest.raises(PullFailed, match="stopped"):
        await pull.wait(timeout_s=1)


def test_every_error_of_nixl_is_translated() -> None:
    kinds = {name for name, value in vars(nixl._bindings).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert kinds == set(NIXL_ERROR_NAMES)


@pytest.mark.parametrize("garbage", [b"", b"\x05\x00\x00\x00hel", b"\xff\xff\xff\xff", b"\x02\x00\x00\x00hi", b"GET / HTTP/1.1\r\n\r\n"])
async def test_side_channel_takes_garbage(garbage: bytes) -> None:
    me = Introduction(engine_id="me", agent_metadata=b"m", arena_address=1, block_bytes=8, num_blocks=1)
    server = SideChannelServer(me)
    port = await server.start("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(garbage)
    writer.write_eof()
    assert await reader.read() == b""
    writer.close()
    assert await introduce("127.0.0.1", port, "me", "you") == me
    with pytest.raises(PullFailed, match="but me is there"):
        await introduce("127.0.0.1", port, "other", "you")
    await server.stop()


@pytest.mark.parametrize("garbage", [b"", b"\x02\x00\x00\x00hi", b"\xff\xff\xff\xff", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
async def test_garbage_from_a_peer_is_no_handshake(garbage: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(garbage)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    with pytest.raises(PullFailed, match="no handshake"):
        await introduce("127.0.0.1", server.sockets[0].getsockname()[1], "me", "you")
    server.close()


async def test_foreign_metadata_is_no_handshake(engine: SimulatedEngine) -> None:
    server = SideChannelServer(Introduction(engine_id="liar", agent_metadata=b"x" * 50, arena_address=1, block_bytes=512, num_blocks=1))
    port = await server.start("127.0.0.1", 0)
    with pytest.raises(PullFailed, match="NIXL refuses"):
        await engine.greet(Peer("liar", "127.0.0.1", port))
    await server.stop()


async def test_peers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jetwake.consumers.kv_transfer_nixl.MAX_PEERS", 2)
    transfers = [KvTransfer(f"t{i}", 4, 64) for i in range(4)]
    ports = [await transfer.start("127.0.0.1", 0) for transfer in transfers]
    for place in (1, 2, 3):
        await transfers[0].connect("127.0.0.1", ports[place], f"t{place}", 5.0)
    with pytest.raises(PullFailed, match="no handshake with t1"):
        transfers[0].post("t1", [0], [0], b"")
    transfers[3].arena.fill(9)
    pull = transfers[0].post("t3", [1, 2], [3, 0], b"note")
    assert await pull.wait(5.0) == 128
    assert transfers[0].arena[:, 0].tolist() == [9, 0, 0, 9]
    notes = list[bytes]()
    await until(lambda: notes.extend(transfers[3].poll_notifications()) or bool(notes))
    assert notes == [b"note"]
    for transfer in transfers:
        await transfer.stop()
        await transfer.stop()
