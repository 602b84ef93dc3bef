"""Lets simulated steps take their time: one step after the other, as on one accelerator, decoding sequences sharing each step.

A step that takes no time costs one turn of the event loop. Steps shorter than the loop's timer are right on average: a busy
clock counts from where the last step should have ended, and takes several decode steps at once when it is behind.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from .timing import Timing

MOST_STEPS_AT_ONCE = 16


class StepClock:
    """`run` is the engine's loop; it must run while anything waits. `used_fraction` tells the part of the KV cache in use."""

    def __init__(self, timing: Timing, used_fraction: Callable[[], float]) -> None:
        self._timing = timing
        self._used_fraction = used_fraction
        self._prefills: deque[tuple[float, asyncio.Future[int]]] = deque()
        self._decodes: list[tuple[int, asyncio.Future[int]]] = []
        self._work = asyncio.Event()
        self._ends_at = 0.0
        self.last_step_at = 0.0
        self._going = asyncio.Event()
        self._going.set()

    @property
    def frozen(self) -> bool:
        return not self._going.is_set()

    def freeze(self) -> None:
        """No step ends until `thaw`."""
        self._going.clear()

    def thaw(self) -> None:
        self._ends_at = 0.0
        self._going.set()

    async def prefill(self, new_tokens: int, context_tokens: int) -> None:
        await self._going.wait()
        seconds = self._timing.prefill_s(new_tokens, context_tokens)
        if seconds <= 0:
            self.note_progress()
            return
        await self._wait(lambda done: self._prefills.append((seconds, done)))

    async def decode(self, context_tokens: int) -> int:
        """A step for a sequence of so many tokens: how many it gives by now. 0: nothing takes time, and the caller may draw a handful."""
        await self._going.wait()
        if self._timing.decode_step_s(1, self._used_fraction(), context_tokens) <= 0:
            self.note_progress()
            await asyncio.sleep(0)
            return 0
        return await self._wait(lambda done: self._decodes.append((context_tokens, done)))

    async def run(self) -> None:
        """One prefill, then one shared decode step, and so on: neither starves the other."""
        while True:
            if not self._prefills and not self._decodes:
                self._work.clear()
                await self._work.wait()
                self._ends_at = 0.0
            if self._prefills:
                seconds, done = self._prefills.popleft()
                await self._step(seconds, [done])
            if self._decodes:
                batch, self._decodes = self._decodes, []
                context_tokens = sum(tokens for tokens, _ in batch)
                seconds = self._timing.decode_step_s(len(batch), self._used_fraction(), context_tokens)
                await self._step(seconds, [done for _, done in batch], MOST_STEPS_AT_ONCE)

    async def _wait(self, enter: Callable[[asyncio.Future[int]], None]) -> int:
        done = asyncio.get_running_loop().create_future()
        enter(done)
        self._work.set()
        return await done

    async def _step(self, seconds: float, batch: list[asyncio.Future[int]], most_at_once: int = 1) -> None:
        """Members that were cancelled meanwhile are done already."""
        now = asyncio.get_running_loop().time()
        begun = self._ends_at or now
        steps = min(most_at_once, 1 + max(0, int((now - begun) / seconds))) if seconds > 0 else 1
        self._ends_at = begun + steps * seconds
        await asyncio.sleep(max(self._ends_at - now, 0))
        await self._going.wait()
        self.note_progress()
        for done in batch:
            if not done.done():
                done.set_result(steps)
        await asyncio.sleep(0)  # the sequences draw their tokens and come back for the next step

    def note_progress(self) -> None:
        self.last_step_at = asyncio.get_running_loop().time()
