"""What a worker has in hand, counted in one place for all roles, and told to the routers as it changes.

Writes `jw.load.<worker>`. When the engine dies, `engine_dead` is set: the worker takes nothing more and its process ends.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, suppress

from ..pipeline import instruments
from ..pipeline.publish import Publisher
from ..schemas import signals, subjects
from ..schemas.errors import BrokerUnavailable, EngineDead
from ..schemas.requests import InferenceRequest
from ..schemas.workers import WorkerCard, WorkerLoad
from .engine import Engine
from .prefill_backlog import PrefillBacklog
from .untold_blocks import UntoldBlocks

REPORT_AT_MOST_EVERY_S = 0.02
REPORT_FREE_AT_MOST_EVERY_S = 0.005
"""Routers count a job as queued until the worker says that it has taken it: later, and an idle worker looks busy to them, and a request
waits for nothing. So one that has no prefill left says that at once."""
DECODE_REPORT_AT_MOST_EVERY_S = 0.05
"""Of a decode worker, routers want to know whether it has room: nobody waits for the word of one request."""
REPORT_AT_LEAST_EVERY_S = 1.0


class Prefilling:
    """The prompt tokens of one request that are still to be computed here. `done` when its first token is there."""

    def __init__(self, work: "Workload", new_tokens: int, *, is_prefill: bool) -> None:
        self._work = work
        self._is_prefill = is_prefill
        self._started_s = time.monotonic()
        self._place = work.backlog.begin(new_tokens, self._started_s) if new_tokens else 0

    def measured(self, computed_tokens: int) -> None:
        """The prefill ended and computed so many tokens: one more job to learn its timing from."""
        now_s = time.monotonic()
        self._work.backlog.measured(computed_tokens, self._started_s, now_s)
        if self._work.untold is not None:
            self._work.untold.prefilled(computed_tokens, self._started_s, now_s)
        self.done()

    def done(self) -> None:
        self._work.backlog.end(self._place, time.monotonic())
        self._place = 0
        if self._is_prefill and not len(self._work.backlog):
            self._work.freed.set()
        self._is_prefill = False
        self._work.changed.set()


class Workload:
    """`untold`: where prefills here are compared with the KV events that were told. `freed`: its last prefill has ended."""

    def __init__(self, slots: int, untold: UntoldBlocks | None = None) -> None:
        self.slots = slots
        self.untold = untold
        self.fetched = self.finished = self.prompt_tokens = self.fetched_sequence = 0
        self.backlog = PrefillBacklog()
        self.engine_dead = asyncio.Event()
        self.changed = asyncio.Event()
        self.freed = asyncio.Event()

    @property
    def in_hand(self) -> int:
        return self.fetched - self.finished

    def free_slots(self) -> int:
        return 0 if self.engine_dead.is_set() else self.slots - self.in_hand

    @asynccontextmanager
    async def holding(self, request: InferenceRequest, sequence: int = 0, new_tokens: int = 0) -> AsyncGenerator[Prefilling]:
        """Counts the request while its body runs, and notes when what ends the body is the engine's death.

        `sequence`: its place in this worker's own queue; 0: it came by handoff. `new_tokens`: prompt tokens expected to be computed here.
        """
        prefilling = Prefilling(self, new_tokens, is_prefill=sequence > 0)
        self.fetched += 1
        self.fetched_sequence = max(self.fetched_sequence, sequence)
        self.changed.set()
        self.prompt_tokens += request.prompt_length_tokens
        try:
            yield prefilling
        except EngineDead:
            self.engine_dead.set()
            raise
        finally:
            self.finished += 1
            self.prompt_tokens -= request.prompt_length_tokens
            prefilling.done()
            self.changed.set()


class LoadReporter:
    """`works`: what comes by the worker's own queue first, then what comes by handoff. `held` gives blocks and handoffs kept for
    decode workers (0, 0 elsewhere), `room` what would be taken now, `promised` the blocks that the requests in hand need in all,
    where it is known. `at_most_every_s`: the least time between two reports, but for the word that no prefill is left.
    """

    def __init__(
        self,
        publisher: Publisher,
        card: WorkerCard,
        works: Sequence[Workload],
        engine: Engine,
        held: Callable[[], tuple[int, int]],
        room: Callable[[], int],
        promised: Callable[[], int] = lambda: 0,
        *,
        at_most_every_s: float,
    ) -> None:
        self._publisher = publisher
        self._card = card
        self._works = works
        self._changed, self._freed = asyncio.Event(), asyncio.Event()
        for work in works:
            work.changed, work.freed = self._changed, self._freed
        self._engine = engine
        self._held = held
        self._room = room
        self._promised = promised
        self._at_most_every_s = at_most_every_s

    def load(self) -> WorkerLoad:
        held_blocks, held_handoffs = self._held()
        untold, backlog = self._works[0].untold, self._works[0].backlog
        used_blocks = self._engine.stats().used_blocks
        return WorkerLoad(
            worker=self._card.worker,
            incarnation=self._card.incarnation,
            fetched_requests=sum(work.fetched for work in self._works),
            finished_requests=sum(work.finished for work in self._works),
            running_requests=sum(work.in_hand for work in self._works),
            running_prompt_tokens=sum(work.prompt_tokens for work in self._works),
            running_new_tokens=sum(work.backlog.new_tokens for work in self._works),
            fetched_sequence=self._works[0].fetched_sequence,
            prefill_timing=backlog.timing(),
            running_prefills=len(backlog),
            prefill_left_s=backlog.left_s(time.monotonic()),
            used_blocks=used_blocks,
            wanted_blocks=max(0, self._promised() - used_blocks),
            held_blocks=held_blocks,
            held_handoffs=held_handoffs,
            free_slots=sum(work.free_slots() for work in self._works),
            room=max(0, self._room()),
            kv_silent_s=untold.silent_s(time.monotonic()) if untold else 0.0,
        )

    async def run(self) -> None:
        """Tells the load as soon as it changed, and once a second anyway, until cancelled. One that cannot be told is followed by the next."""
        while True:
            self._changed.clear()
            self._freed.clear()
            load = self.load()
            self._show(load)
            with suppress(BrokerUnavailable):  # away for so long that no more fits into the buffer
                await self._publisher.send(subjects.load(self._card.worker), load)
            await asyncio.sleep(REPORT_FREE_AT_MOST_EVERY_S)
            if not await _is_set_within(self._freed, self._at_most_every_s - REPORT_FREE_AT_MOST_EVERY_S):
                await _is_set_within(self._changed, REPORT_AT_LEAST_EVERY_S)

    def _show(self, load: WorkerLoad) -> None:
        if not instruments.are_read():
            return
        stats = self._engine.stats()
        for metric, value in (
            (signals.WORKER_FREE_SLOTS, load.free_slots),
            (signals.WORKER_RUNNING, load.running_requests),
            (signals.WORKER_FREE_BLOCKS, stats.capacity_blocks - stats.used_blocks),
            (signals.WORKER_USED_BLOCKS, stats.used_blocks),
            (signals.WORKER_HELD_BLOCKS, load.held_blocks),
            (signals.WORKER_HELD_HANDOFFS, load.held_handoffs),
            (signals.WORKER_STEP_AGE, stats.last_step_age_s),
        ):
            instruments.show(metric, value, self._card.worker, self._card.role)


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()
