"""What one process tells about itself to whoever started it: a small file, written again each second, for probes of containers.

Writes the file that `--health-file` names; `jetwake health` reads it there. Promises: a process whose event loop stands still writes
nothing, and so is found out by the age of what it wrote; nothing is left when the process ended in order. Needs no port and no broker.
"""

import asyncio
import json
import os
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..schemas.errors import SetupError
from .collector import settle

WRITE_EVERY_S = 1.0
STALE_S = 10.0
"""A process that wrote nothing for so long is stuck."""

State = Literal["starting", "ready", "cut off", "draining", "stalled"]


@dataclass(frozen=True)
class Health:
    """`starting`: an engine loads, a gateway waits for its model. `cut off`: the broker is away. `stalled`: about to end."""

    state: State
    reason: str = ""


class HealthTeller:
    """`look` is what the process is asked each second; whoever composes it sets that as soon as there is something to ask."""

    def __init__(self, name: str, file: Path | None) -> None:
        self._name = name
        self._file = file
        self.look: Callable[[], Health] = lambda: Health("starting")

    def ready(self, look: Callable[[], Health]) -> None:
        """The process serves from now on."""
        self.look = look
        settle()

    @asynccontextmanager
    async def telling(self) -> AsyncGenerator[None]:
        """Tells as long as the body runs. Raises SetupError: the file cannot be written."""
        if self._file is None:
            yield
            return
        self._write(self._file)
        task = asyncio.create_task(self._run(self._file))
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            self._file.unlink(missing_ok=True)

    async def _run(self, file: Path) -> None:
        while True:
            await asyncio.sleep(WRITE_EVERY_S)
            self._write(file)

    def _write(self, file: Path) -> None:
        health = self.look()
        facts = {"name": self._name, "state": health.state, "reason": health.reason, "at_s": time.time()}
        new = file.with_name(f"{file.name}.{os.getpid()}")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            new.write_text(json.dumps(facts))
            new.replace(file)
        except OSError as error:
            raise SetupError(f"--health-file {file} cannot be written: {error.strerror}") from error


def problem_of(text: str, now_s: float, must_be_ready: bool) -> str:
    """Why the process that wrote `text` is not well; empty when it is. Pure.

    Well is: it wrote lately, and is not about to end on its own. One that must be ready would also take work now.
    """
    try:
        facts = json.loads(text)
        state, reason, age_s = str(facts["state"]), str(facts["reason"]), now_s - float(facts["at_s"])
    except (ValueError, KeyError, TypeError) as error:
        return f"the health file cannot be read: {error!r}"
    if age_s > STALE_S:
        return f"nothing was written for {age_s:.0f} s: its event loop stands still"
    if state == "stalled" or (must_be_ready and state != "ready"):
        return f"{state}: {reason}" if reason else state
    return ""
