"""Stops a process from outside, as a debugger or a starved machine does. Reads `/proc`."""

import asyncio
import os
import signal
from pathlib import Path


async def freeze(pid: int) -> None:
    """Returns when no thread of it runs any more: a signal to stop reaches a busy thread some time later. Raises ProcessLookupError."""
    os.kill(pid, signal.SIGSTOP)
    while not all(_stands_still(thread) for thread in Path(f"/proc/{pid}/task").glob("*/stat")):
        await asyncio.sleep(0.001)


def thaw(pid: int) -> None:
    """Raises ProcessLookupError."""
    os.kill(pid, signal.SIGCONT)


def _stands_still(stat: Path) -> bool:
    try:
        return stat.read_text().rpartition(") ")[2][0] in "TtXZ"
    except OSError:  # it has ended
        return True
