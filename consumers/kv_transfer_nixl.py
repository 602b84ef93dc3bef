"""Moves KV blocks between engines through NIXL: one agent, one arena of equal blocks in main memory, a side channel to meet peers.

`connect` meets a peer, `post` starts reading blocks of its arena into ours, and the returned `Pull` tells when they are here.
A posted read cannot be called back: blocks of a pull that failed or was given up belong to it until `when_settled` says so, and
must not be used before. When the last byte is here, NIXL hands the peer a note, which it finds with `poll_notifications`.
"""

import asyncio
import importlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..schemas.errors import PullFailed, SetupError
from .kv_side_channel import Introduction, SideChannelServer, introduce

MAX_PEERS = 1024
LOOKS_AT_ONCE = 3
"""A waiting pull looks at so many turns of the event loop, then every millisecond, later every five."""

NIXL_ERROR_NAMES = (
    "nixlBackendError",
    "nixlCancelledError",
    "nixlInvalidParamError",
    "nixlMismatchError",
    "nixlNoTelemetryError",
    "nixlNotAllowedError",
    "nixlNotFoundError",
    "nixlNotPostedError",
    "nixlNotSupportedError",
    "nixlRemoteDisconnectError",
    "nixlRepostActiveError",
    "nixlUnknownError",
)


class _Nixl:
    """The bindings (untyped C++, so `Any` here), loaded when an engine starts: they are an optional installation."""

    def __init__(self) -> None:
        try:
            self.module: Any = importlib.import_module("nixl")._bindings
        except ImportError as error:
            raise SetupError(f"NIXL is not installed: pip install 'jetwake[simulated]' ({error})") from error
        self.errors: tuple[type[Exception], ...] = tuple(getattr(self.module, name) for name in NIXL_ERROR_NAMES)
        self.done: object = self.module.NIXL_SUCCESS
        self.in_progress: object = self.module.NIXL_IN_PROG

    def agent(self, name: str, progress_delay_us: int) -> Any:
        """The progress thread stays on, or a peer must wait for our event loop; with no delay it would burn a whole core."""
        config = self.module.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = progress_delay_us
        config.useListenThread = False
        config.syncMode = self.module.NIXL_THREAD_SYNC_NONE
        agent = self.module.nixlAgent(name, config)
        agent.createBackend("UCX", {})
        return agent


def backends() -> list[str]:
    """What this installation of NIXL can move bytes with. Raises SetupError."""
    nixl = _Nixl()
    config = nixl.module.nixlAgentConfig()
    config.useProgThread = False
    config.useListenThread = False
    return sorted(nixl.module.nixlAgent("backends", config).getAvailPlugins())


@dataclass(frozen=True)
class _Peer:
    engine_id: str
    blocks: int
    num_blocks: int


class Pull:
    """One read of blocks, posted. Settled: nothing will be written to its local blocks any more."""

    def __init__(self, nixl: _Nixl, agent: Any, handle: int, moved_bytes: int, status: object) -> None:
        self._nixl, self._handle, self._bytes = nixl, handle, moved_bytes
        self._agent: Any = agent
        self._then: list[Callable[[], None]] = []
        self.settled = False
        self.error = ""
        self._see(status)

    def poll(self) -> bool:
        """Whether it is settled by now."""
        if not self.settled:
            try:
                self._see(self._agent.getXferStatus(self._handle))
            except self._nixl.errors as error:
                self._settle(str(error))
        return self.settled

    async def wait(self, timeout_s: float) -> int:
        """The bytes that were moved, when they are here. Raises PullFailed; then see `when_settled`."""
        if not self.settled:
            await self._wait_settled(timeout_s)
        if self.error:
            raise PullFailed(f"NIXL could not move the blocks: {self.error}")
        return self._bytes

    def when_settled(self, then: Callable[[], None]) -> None:
        """Call `then` once, as soon as the local blocks may be used for something else."""
        if self.poll():
            then()
        else:
            self._then.append(then)

    def abandon(self) -> None:
        """The agent is about to go, and with it every transfer."""
        if not self.settled:
            self._settle("the engine was stopped")

    async def _wait_settled(self, timeout_s: float) -> None:
        now = asyncio.get_running_loop().time
        began, looks = now(), 0
        while not self.poll():
            waited, looks = now() - began, looks + 1
            if waited > timeout_s:
                raise PullFailed(f"the blocks did not arrive within {timeout_s} s")
            await asyncio.sleep(0 if looks <= LOOKS_AT_ONCE else 0.001 if waited < 0.05 else 0.005)

    def _see(self, status: object) -> None:
        if status == self._nixl.done:
            self._settle("")
        elif status != self._nixl.in_progress:
            self._settle(str(status))

    def _settle(self, error: str) -> None:
        self.settled, self.error = True, error
        agent, self._agent = self._agent, None  # a settled pull must not keep the agent of a stopped engine alive
        try:
            agent.releaseXferReq(self._handle)
        except self._nixl.errors as release_error:
            self.error = self.error or str(release_error)
        for then in self._then:
            then()
        self._then.clear()


class KvTransfer:
    """`arena[i]` is block i, as 64-bit words. Opened by `start`, closed by `stop`; for the thread of one event loop."""

    def __init__(self, engine_id: str, num_blocks: int, block_bytes: int, progress_delay_us: int = 100) -> None:
        self.arena: NDArray[np.uint64] = np.zeros((num_blocks, block_bytes // 8), dtype=np.uint64)
        self._engine_id, self._num_blocks, self._block_bytes = engine_id, num_blocks, block_bytes
        self._progress_delay_us = progress_delay_us
        self._peers: OrderedDict[str, _Peer] = OrderedDict()
        self._meeting: dict[str, asyncio.Lock] = {}
        self._unsettled: set[Pull] = set()
        self._server: SideChannelServer | None = None
        self._agent: Any = None
        self._registered: Any = None
        self._local: int | None = None

    async def start(self, host: str, port: int) -> int:
        """Returns the port of the side channel. Raises SetupError."""
        try:
            await asyncio.to_thread(self._open)
            self._server = SideChannelServer(self._introduction())
            return await self._server.start(host, port)
        except OSError as error:
            await self.stop()
            raise SetupError(f"the side channel cannot listen on {host}:{port}: {error}") from error
        except SetupError:
            await self.stop()
            raise

    async def stop(self) -> None:
        """The agent goes, so peers see a disconnection; what they would still read is wiped first. Twice is safe."""
        if self._server is not None:
            await self._server.stop()
        self.arena.fill(0)
        for engine_id in list(self._peers):
            self.forget(engine_id)
        for pull in self._unsettled:
            pull.abandon()
        self._unsettled.clear()
        agent, self._agent = self._agent, None
        if agent is not None and self._local is not None:
            agent.releasedDlistH(self._local)
            agent.deregisterMem(self._registered, [])

    async def connect(self, host: str, port: int, engine_id: str, timeout_s: float) -> None:
        """Meet a peer; at once when it is known. Raises PullFailed within `timeout_s`."""
        if engine_id in self._peers:
            return
        lock = self._meeting.setdefault(engine_id, asyncio.Lock())
        try:
            async with asyncio.timeout(timeout_s), lock:
                if engine_id not in self._peers:
                    self._add(await introduce(host, port, engine_id, self._engine_id))
        except TimeoutError as error:
            raise PullFailed(f"no handshake with {engine_id} at {host}:{port} within {timeout_s} s") from error
        finally:
            if self._meeting.get(engine_id) is lock and not lock.locked():
                del self._meeting[engine_id]

    def post(self, engine_id: str, remote_blocks: Sequence[int], local_blocks: Sequence[int], note: bytes) -> Pull:
        """Begin to read a peer's blocks into ours, pair by pair; the peer gets `note` at the end. Raises PullFailed: nothing began."""
        peer = self._peers.get(engine_id)
        if peer is None:
            raise PullFailed(f"no handshake with {engine_id}")
        if not all(0 <= block < peer.num_blocks for block in remote_blocks):
            raise PullFailed(f"{engine_id} has {peer.num_blocks} blocks, none of id {max(remote_blocks)} or {min(remote_blocks)}")
        try:
            handle = self._agent.makeXferReq(
                self._nixl.module.NIXL_READ, self._local, list(local_blocks), peer.blocks, list(remote_blocks), note, []
            )
            status = self._agent.postXferReq(handle, note)
        except self._nixl.errors as error:
            self.forget(engine_id)
            raise PullFailed(f"{engine_id} cannot be read: {error}") from error
        pull = Pull(self._nixl, self._agent, handle, len(local_blocks) * self._block_bytes, status)
        if not pull.settled:
            self._unsettled.add(pull)
        return pull

    def forget(self, engine_id: str) -> None:
        """Drop what is known of a peer. Unknown ones are ignored."""
        peer = self._peers.pop(engine_id, None)
        if peer is None:
            return
        try:
            self._agent.releasedDlistH(peer.blocks)
            self._agent.invalidateRemoteMD(engine_id)
        except self._nixl.errors:
            pass  # NIXL dropped it first

    def poll_notifications(self) -> list[bytes]:
        """Notes of finished pulls by peers, since the last look."""
        found: dict[str, list[bytes]] = self._agent.getNotifs({}, [])
        return [note for notes in found.values() for note in notes]

    def poll_unsettled(self) -> int:
        """Look after pulls nobody waits for; how many are still open."""
        self._unsettled = {pull for pull in self._unsettled if not pull.poll()}
        return len(self._unsettled)

    def _open(self) -> None:
        self._nixl = _Nixl()
        try:
            self._agent = self._nixl.agent(self._engine_id, self._progress_delay_us)
            whole = [(self.arena.ctypes.data, self.arena.nbytes, 0, "")]
            self._registered = self._nixl.module.nixlRegDList(self._nixl.module.DRAM_SEG, whole)
            self._agent.registerMem(self._registered, [])
            self._local = self._prepare(self._nixl.module.NIXL_INIT_AGENT, self.arena.ctypes.data, self._num_blocks)
        except self._nixl.errors as error:
            raise SetupError(f"NIXL's UCX backend does not start: {error}") from error

    def _introduction(self) -> Introduction:
        return Introduction(
            engine_id=self._engine_id,
            agent_metadata=self._agent.getLocalMD(),
            arena_address=self.arena.ctypes.data,
            block_bytes=self._block_bytes,
            num_blocks=self._num_blocks,
        )

    def _prepare(self, agent: str, address: int, num_blocks: int) -> int:
        run = np.array([[address, self._block_bytes, 0, self._block_bytes, num_blocks]], dtype=np.uint64)
        return int(self._agent.prepXferDlist(agent, self._nixl.module.DRAM_SEG, run, []))

    def _add(self, found: Introduction) -> None:
        if found.block_bytes != self._block_bytes:
            raise PullFailed(f"blocks of {found.engine_id} have {found.block_bytes} bytes, ours {self._block_bytes}")
        try:
            name: str = self._agent.loadRemoteMD(found.agent_metadata).decode()
            self._agent.makeConnection(name, [])
            blocks = self._prepare(name, found.arena_address, found.num_blocks)
        except self._nixl.errors as error:
            raise PullFailed(f"NIXL refuses {found.engine_id}: {error}") from error
        self._peers[found.engine_id] = _Peer(found.engine_id, blocks, found.num_blocks)
        if len(self._peers) > MAX_PEERS:
            self.forget(next(iter(self._peers)))
