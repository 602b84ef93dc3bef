"""Child processes that are kept running: started, watched, restarted with backoff, and stopped without leaving anything behind.

A child that ends well, with 0, was drained: a fresh one takes its place at once, so that `jetwake drain` is a rolling restart.

A child that exits with 2 (bad usage: an option, a file or the installation is wrong) is not restarted; that ends the supervisor
with what the child last wrote.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..schemas.errors import SetupError

PARENT_VARIABLE = "_JETWAKE_PARENT_PID"
USAGE_EXIT_CODE = 2


@dataclass
class Child:
    """One supervised process: the `jetwake` command with `arguments`, writing to `log_file`. What may be secret is in `environment`,
    which no other user of the machine sees.
    """

    name: str
    arguments: Sequence[str]
    log_file: Path
    environment: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    state: str = "waiting"
    restarts: int = 0
    pid: int = 0
    process: asyncio.subprocess.Process | None = field(default=None, repr=False)


class Supervisor:
    """`grace_s`: how long children may take to drain before they are killed. `longest_pause_s`: before one that keeps ending is started again."""

    def __init__(
        self, children: Sequence[Child], grace_s: float, on_change: Callable[[], None] = lambda: None, longest_pause_s: float = 30.0
    ) -> None:
        self.children = children
        self._grace_s = grace_s
        self._on_change = on_change
        self._longest_pause_s = longest_pause_s
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Until `stop()`. Raises SetupError for a child that can never start."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for child in self.children:
                    tasks.create_task(self._keep(child))
        except BaseExceptionGroup as group:
            setup = group.subgroup(SetupError)
            if setup is None:
                raise
            raise setup.exceptions[0] from None

    def stop(self) -> None:
        self._stopping.set()

    async def _keep(self, child: Child) -> None:
        pause_s = 0.5
        while not self._stopping.is_set():
            started_s = time.monotonic()
            code = await self._run_once(child)
            if self._stopping.is_set():
                break
            if code == USAGE_EXIT_CODE:
                raise SetupError(f"{child.name} cannot start:\n{last_lines(child.log_file)}")
            if code == 0:
                self._say(child, "drained, starting afresh")
                continue
            pause_s = 0.5 if time.monotonic() - started_s > 60 else min(pause_s * 2, self._longest_pause_s)
            child.restarts += 1
            self._say(child, f"ended with {code}, again in {pause_s:g} s")
            await self._pause(pause_s)
        self._say(child, "stopped")

    async def _run_once(self, child: Child) -> int:
        self._say(child, "starting")
        child.log_file.parent.mkdir(parents=True, exist_ok=True)
        with child.log_file.open("ab") as log:
            child.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "jetwake.deploy.cli",
                *child.arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **child.environment, PARENT_VARIABLE: str(os.getpid())},
                start_new_session=True,  # Ctrl-C reaches the parent only, which drains the children in order
            )
        child.pid = child.process.pid
        self._say(child, "running")
        ended = asyncio.create_task(child.process.wait())
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
            return ended.result() if ended.done() else await self._end(child, child.process)
        finally:
            for task in (ended, stopping):
                task.cancel()
            if child.process.returncode is None:
                child.process.kill()
            child.pid = 0

    async def _end(self, child: Child, process: asyncio.subprocess.Process) -> int:
        self._say(child, "draining")
        process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self._grace_s):
                return await process.wait()
        except TimeoutError:
            process.kill()
            return await process.wait()

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return

    def _say(self, child: Child, state: str) -> None:
        child.state = state
        self._on_change()


def last_lines(path: Path, count: int = 12) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-count:]) if path.exists() else ""
