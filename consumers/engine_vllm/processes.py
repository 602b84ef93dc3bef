"""The operating system's processes of one engine: made by `build`, gone after `end`.

Reads nothing but the process table. Promises that whatever vLLM's own shutdown leaves behind is killed: a start that was given up
half-way, or a process that hangs. Their sockets live in a folder of their own, which goes with them, or
with the next engine that starts here when this process is killed.
"""

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import psutil

from ...schemas.errors import SetupError
from ..scratch import ScratchFolder
from .settings import VllmSettings, environment

if TYPE_CHECKING:
    from .runtime import Runtime

ENGINE_VARIABLE = "_JETWAKE_ENGINE_ID"
RESOURCE_TRACKER = "multiprocessing.resource_tracker"
POLL_S = 0.1
KILL_WAIT_S = 10.0


class EngineProcesses:
    def __init__(self, settings: VllmSettings, engine_id: str) -> None:
        self._settings = settings
        self._engine_id = engine_id
        self._found: set[psutil.Process] = set()
        # Children die with the *thread* that spawned them (see plugin.py), so it is ours and lives as long as the engine.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vllm-engine")
        self._building: asyncio.Future[Runtime] | None = None
        self._sockets: ScratchFolder | None = None

    @property
    def spawned(self) -> bool:
        """Whether the engine's processes exist, and with them a copy of the environment."""
        return bool(self._found)

    async def build(self, side_channel_port: int) -> "Runtime":
        """Raises SetupError. When cancelled, call `end`."""
        self._sockets = ScratchFolder("jw-")
        variables = environment(self._settings, side_channel_port)
        variables |= {ENGINE_VARIABLE: self._engine_id, "VLLM_RPC_BASE_PATH": str(self._sockets.path)}
        self._building = asyncio.get_running_loop().run_in_executor(self._thread, self._build, variables)
        while not self._building.done():
            # Only young processes can be recognised: later they write their title over their environment.
            self._found.update(_spawned_for(self._engine_id))
            await asyncio.wait({self._building}, timeout=POLL_S)
        return self._building.result()

    def _build(self, variables: dict[str, str]) -> "Runtime":
        os.environ.update(variables)
        try:
            from .runtime import Runtime
        except ImportError as error:
            raise SetupError(f'vLLM cannot be imported ({error}): install "jetwake[cpu]" or "jetwake[gpu]"') from error
        return Runtime.build(self._settings, self._engine_id)

    def add(self, process_ids: list[int]) -> None:
        """Processes known by other means."""
        for process_id in process_ids:
            try:
                self._found.add(psutil.Process(process_id))
            except psutil.NoSuchProcess:
                continue

    def alive(self) -> list[psutil.Process]:
        found: set[psutil.Process] = set()
        for process in self._found:
            try:
                found.update([process, *process.children(recursive=True)])
            except psutil.Error:
                continue
        # Python's resource tracker must outlive the others: it removes the shared memory they leave.
        return [process for process in found if process.is_running() and not _is_resource_tracker(process)]

    async def end(self) -> None:
        """Safe at any time, and twice."""
        building, self._building = self._building, None
        if building is not None:
            while not building.done():
                # A start that was given up: without its processes it fails soon.
                self._found.update(_spawned_for(self._engine_id))
                _kill(self.alive())
                await asyncio.wait({building}, timeout=POLL_S)
            ending = asyncio.get_running_loop().run_in_executor(self._thread, self._end, building)
            await asyncio.shield(ending)
        self._thread.shutdown(wait=False)

    def _end(self, building: "asyncio.Future[Runtime]") -> None:
        processes = self.alive()
        # vLLM's own last resort would also kill the resource tracker, and leave shared memory behind.
        impatience = threading.Timer(self._settings.stop_timeout_s, _kill, [processes])
        impatience.start()
        if not building.cancelled() and building.exception() is None:
            building.result().shutdown(self._settings.stop_timeout_s + KILL_WAIT_S)
        impatience.cancel()
        _kill(processes)
        if self._sockets is not None:
            self._sockets.remove()


def _spawned_for(engine_id: str) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for process in psutil.Process().children():
        try:
            if process.environ().get(ENGINE_VARIABLE) == engine_id:
                found.append(process)
        except psutil.Error:
            continue  # It ended meanwhile, or is a zombie that only waits to be reaped.
    return [process for process in found if not _is_resource_tracker(process)]


def _is_resource_tracker(process: psutil.Process) -> bool:
    try:
        return RESOURCE_TRACKER in " ".join(process.cmdline())
    except psutil.Error:
        return False


def _kill(processes: list[psutil.Process], wait_s: float = KILL_WAIT_S) -> None:
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(processes, timeout=wait_s)
