"""One worker's engine on a virtual clock: continuous batching, chunked prefill, preemption, on the product's own block pool.

Pure. A step gives every decoding sequence its token first, then spends what is left of its token budget on prompts, in order of arrival;
what it computes becomes cached as it is scheduled, as in vLLM. A step's time is that of its prompt tokens plus that of
its decoding. Sequences that find no block for their next token push out the last to come, which starts over. Steps between which nothing
changes but the length of the answers are taken at once.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ...consumers.block_pool import BlockPool
from ...consumers.timing import Timing
from ...schemas.blocks import block_count
from ...schemas.workers import Role
from .replay_decode_time import DecodeRun, decode_run
from .replay_result import TokenGaps


@dataclass(eq=False, slots=True)
class Job:
    """One request in one engine. `length`: tokens known, prompt and answer; `computed` of them are in the cache. `hashes`: of the prompt's
    full blocks. `expected_new_tokens`: prompt tokens that the router expected to be computed here.
    """

    number: int
    prompt_tokens: int
    output_tokens: int
    hashes: Sequence[int]
    sequence: int = 0
    expected_new_tokens: int = 0
    length: int = 0
    computed: int = 0
    drawn: int = 0
    hit_tokens: int = 0
    admitted_s: float = -1.0
    last_token_s: float = -1.0
    is_pulled: bool = False
    blocks: list[int] = field(default_factory=list[int])


class EngineListener(Protocol):
    """Told what becomes of jobs, at the time it happens."""

    def admitted(self, job: Job, now_s: float) -> None: ...

    def first_token(self, job: Job, now_s: float) -> None: ...

    def second_token(self, job: Job, now_s: float) -> None: ...

    def ended(self, job: Job, now_s: float) -> None:
        """For the engine of a prefill worker: its one token is there, and its blocks are held until `release`."""
        ...


@dataclass(slots=True)
class _Step:
    """In flight. `run`: of decode steps alone; else one step that computes `parts`: jobs and how many tokens of each."""

    start_s: float
    end_s: float
    run: DecodeRun | None = None
    parts: list[tuple[Job, int]] = field(default_factory=list[tuple[Job, int]])


class ReplayEngine:
    def __init__(
        self,
        role: Role,
        pool: BlockPool,
        timing: Timing,
        listener: EngineListener,
        gaps: TokenGaps,
        *,
        max_sequences: int,
        max_step_tokens: int,
        step_by_step: bool = False,
    ) -> None:
        self.pool = pool
        self.preemptions = 0
        self._capacity_tokens = pool.num_blocks * pool.block_size_tokens
        self._role = role
        self._timing = timing
        self._listener = listener
        self._gaps = gaps
        self._max_sequences = max_sequences
        self._max_step_tokens = max_step_tokens
        self._step_by_step = step_by_step
        self._waiting: deque[Job] = deque()
        self._computing: list[Job] = []
        self._decoding: list[Job] = []
        self._joining: list[Job] = []
        self._fresh: list[Job] = []
        self._step: _Step | None = None
        self._idle_since_s = 0.0

    # -- what others see ----------------------------------------------------------------------------------------------

    @property
    def next_s(self) -> float:
        """When `run` has something to do; infinity when nothing is in hand, or nothing can go on."""
        if self._step is not None:
            return self._step.end_s
        return self._idle_since_s if self._waiting or self._joining or self.running else math.inf

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._computing) + len(self._decoding) + len(self._joining)

    def fits_ever(self, job: Job) -> bool:
        tokens = job.prompt_tokens if self._role == "prefill" else job.prompt_tokens + job.output_tokens - 1
        return block_count(tokens, self.pool.block_size_tokens) <= self.pool.num_blocks

    def wanted_blocks(self) -> int:
        """What the jobs that wait will need, cached or not."""
        return sum(block_count(job.length, self.pool.block_size_tokens) for job in self._waiting)

    # -- what comes in ------------------------------------------------------------------------------------------------

    def receive(self, job: Job, now_s: float) -> None:
        job.length = job.length or job.prompt_tokens
        if not self._waiting:  # else the first of them stands in the way, and the step in flight changes nothing about that
            self._interrupt(now_s)
        self._waiting.append(job)

    def reserve(self, job: Job, now_s: float) -> bool:
        """Blocks for a prompt that will be pulled, those found here included; False when there is no room. Then: `arrived`."""
        self._interrupt(now_s)
        allocation = self.pool.allocate(job.prompt_tokens + 1, job.hashes)
        if allocation is None:
            return False
        job.blocks, job.hit_tokens = allocation.blocks, allocation.hits * self.pool.block_size_tokens
        return True

    def arrived(self, job: Job, now_s: float) -> None:
        """The prompt's cache was pulled, and its first token is known."""
        self._interrupt(now_s)
        self.pool.commit(job.blocks, job.hashes)
        job.computed, job.length, job.drawn = job.prompt_tokens, job.prompt_tokens + 1, 1
        job.admitted_s, job.is_pulled = now_s, True
        self._joining.append(job)

    def release(self, job: Job, now_s: float) -> None:
        """Of a prefill worker's engine: the blocks held for this job were pulled."""
        self._free(job)
        if self._step is None:
            self._idle_since_s = now_s

    # -- time ---------------------------------------------------------------------------------------------------------

    def run(self, now_s: float) -> None:
        """Ends the step in flight if its time has come, and begins the next."""
        if self._step is not None:
            if self._step.end_s > now_s:
                return
            self._end_step(self._step)
        self._begin_step(now_s)

    def look(self, now_s: float) -> None:
        """Brings what others see up to date, and changes nothing else."""
        step = self._step
        if step is not None and step.run is not None:
            ended = step.run.steps_until(now_s - step.start_s)
            if ended and step.start_s + step.run.seconds(ended) > now_s:
                ended -= 1
            self._split(step, ended)

    def _interrupt(self, now_s: float) -> None:
        """What comes now gets its turn when the step in flight ends: the run of steps is cut there."""
        step = self._step
        if step is None:
            self._idle_since_s = now_s
        elif step.run is not None and step.run.steps > 1:
            self.look(now_s)
            if self._step is not None and self._step.run is not None:
                self._plan(self._step.start_s, 1)

    def _split(self, step: _Step, ended: int) -> None:
        """Of a run in flight so many steps are over. Never all: the last is for `run` to end."""
        run = step.run
        if run is None or not ended:
            return
        ended = min(ended, run.steps - 1)
        if ended:
            self._decoded(ended, step.start_s, step.start_s + run.seconds(ended), run.seconds(1))
            self._grow()
            self._plan(step.start_s + run.seconds(ended), run.steps - ended)

    # -- steps --------------------------------------------------------------------------------------------------------

    def _begin_step(self, now_s: float) -> None:
        self._step = None
        self._idle_since_s = now_s
        self._decoding += self._joining
        self._fresh += self._joining
        self._joining = []
        has_preempted = self._make_room(now_s)
        self._grow()
        budget = self._max_step_tokens - len(self._decoding)
        parts = list[tuple[Job, int]]()
        for job in self._computing:
            budget -= self._schedule(job, budget, parts)
        while self._waiting and budget > 0 and not has_preempted and self.running < self._max_sequences:
            job = self._waiting[0]
            if not self._admit(job, now_s):
                break
            budget -= self._schedule(job, budget, parts)
        if parts:
            self._step = _Step(now_s, now_s + self._mixed_s(parts), parts=parts)
        elif self._decoding:
            # After pushing out, the next step may take in again: it must be looked at.
            self._plan(now_s, 1 if has_preempted else min(job.output_tokens - job.drawn for job in self._decoding))
        else:
            self._idle_since_s = math.inf

    def _admit(self, job: Job, now_s: float) -> bool:
        allocation = self.pool.allocate(job.length, job.hashes)
        if allocation is None:
            return False
        self._waiting.popleft()
        self._computing.append(job)
        job.blocks = allocation.blocks
        job.computed = allocation.hits * self.pool.block_size_tokens
        if job.admitted_s < 0:
            job.admitted_s, job.hit_tokens = now_s, job.computed
            self._listener.admitted(job, now_s)
        return True

    def _schedule(self, job: Job, budget: int, parts: list[tuple[Job, int]]) -> int:
        tokens = min(job.length - job.computed, budget)
        if tokens <= 0:
            return 0
        block_size = self.pool.block_size_tokens
        self.pool.commit(job.blocks, job.hashes[: (job.computed + tokens) // block_size], job.computed // block_size)
        job.computed += tokens
        parts.append((job, tokens))
        return tokens

    def _mixed_s(self, parts: list[tuple[Job, int]]) -> float:
        new_tokens = sum(tokens for _, tokens in parts)
        context = sum(tokens * (job.computed - tokens) for job, tokens in parts) // new_tokens
        finishing = [job for job, _ in parts if job.computed == job.length]
        batch = len(self._decoding) + len(finishing)
        if not batch or self._role == "prefill":
            return self._timing.prefill_s(new_tokens, context)
        tokens = sum(job.length for job in self._decoding) + sum(job.length for job in finishing)
        return self._timing.mixed_step_s(new_tokens, context, batch, self._used_tokens() / self._capacity_tokens, tokens)

    def _plan(self, start_s: float, steps: int) -> None:
        """A run of up to `steps` decode steps, as far as the blocks last. The first step's are there."""
        if self._step_by_step:
            steps = 1
        free = self.pool.free_blocks
        if steps > 1 and self._blocks_wanted(steps - 1) > free:
            low, high = 0, steps - 1  # steps after the first
            while low < high:
                middle = (low + high + 1) // 2
                if self._blocks_wanted(middle) > free:
                    high = middle - 1
                else:
                    low = middle
            steps = low + 1
        context = sum(job.length for job in self._decoding)
        run = decode_run(self._timing, len(self._decoding), steps, self._used_tokens(), context, self._capacity_tokens)
        self._step = _Step(start_s, start_s + run.seconds(run.steps), run)

    def _end_step(self, step: _Step) -> None:
        self._step = None
        if step.run is not None:
            self._decoded(step.run.steps, step.start_s, step.end_s, step.run.seconds(1))
            return
        self._decoded(1, step.start_s, step.end_s, step.end_s - step.start_s)
        for job, _ in step.parts:
            if job.computed == job.length:
                self._computing.remove(job)
                self._first_drawn(job, step.end_s)

    def _first_drawn(self, job: Job, now_s: float) -> None:
        """The first token since its prompt was computed; not the first of the answer when it was pushed out before."""
        job.drawn += 1
        job.length += 1
        if job.drawn == 1:
            self._listener.first_token(job, now_s)
        else:
            self._gaps.add(now_s - job.last_token_s)
        if job.drawn == 2:
            self._listener.second_token(job, now_s)
        if self._role == "prefill":
            self._listener.ended(job, now_s)
        elif job.drawn >= job.output_tokens:
            self._end(job, now_s)
        else:
            self._decoding.append(job)
            if job.drawn == 1:
                self._fresh.append(job)

    def _decoded(self, steps: int, start_s: float, end_s: float, first_s: float) -> None:
        """Every decoding sequence got so many tokens."""
        decoding = self._decoding
        if not decoding:
            return
        if steps > 1:
            self._grow(steps - 1)  # also for those that end now: what that pushed out of the cache is gone
        pulled = self._second_tokens(start_s + first_s) if self._fresh else 0
        self._gaps.add((end_s - start_s) / steps, steps * len(decoding) - pulled)
        has_ended = False
        for job in decoding:
            job.drawn += steps
            job.length += steps
            job.computed = job.length - 1
            has_ended |= job.drawn >= job.output_tokens
        if has_ended:
            self._decoding = [job for job in decoding if job.drawn < job.output_tokens]
            for job in decoding:
                if job.drawn >= job.output_tokens:
                    self._end(job, end_s)

    def _second_tokens(self, at_s: float) -> int:
        """Returns of how many the first token was not drawn here: how long ago that was, this engine cannot know."""
        pulled = 0
        for job in self._fresh:
            self._listener.second_token(job, at_s)
            pulled += job.is_pulled
        self._fresh = []
        return pulled

    def _end(self, job: Job, now_s: float) -> None:
        self._free(job)
        self._listener.ended(job, now_s)

    # -- blocks -------------------------------------------------------------------------------------------------------

    def _blocks_wanted(self, more_tokens: int) -> int:
        """So that every decoding sequence can compute the token it drew last, and so many more."""
        block_size = self.pool.block_size_tokens
        return sum(max(0, block_count(job.length + more_tokens, block_size) - len(job.blocks)) for job in self._decoding)

    def _grow(self, more_tokens: int = 0) -> None:
        block_size = self.pool.block_size_tokens
        for job in self._decoding:
            missing = block_count(job.length + more_tokens, block_size) - len(job.blocks)
            if missing > 0 and not self.pool.grow(job.blocks, missing):
                raise AssertionError("a run of steps was longer than its blocks")

    def _make_room(self, now_s: float) -> bool:
        """Pushes out the last to come until every other has a block for its next token."""
        has_preempted = False
        while self._blocks_wanted(0) > self.pool.free_blocks:
            job = self._computing.pop() if self._computing else self._decoding.pop()
            self._free(job)
            job.last_token_s = now_s
            if job in self._fresh:
                self._fresh.remove(job)
            job.computed = 0
            self._waiting.appendleft(job)
            self.preemptions += 1
            has_preempted = True
        return has_preempted

    def _free(self, job: Job) -> None:
        self.pool.release(job.blocks)
        job.blocks = []

    def _used_tokens(self) -> int:
        """Tokens that the used blocks hold, shared ones once. Grows by one for each sequence and step, whatever the blocks' borders."""
        block_size = self.pool.block_size_tokens
        return self.pool.used_blocks * block_size - sum(len(job.blocks) * block_size - job.length for job in self._decoding)
