"""One worker of a replay: its queue and its slots around its engine, and what it tells of itself, as the live consumers do it."""

import math
from collections import deque
from typing import Protocol

from ...consumers.block_pool import BlockPool
from ...consumers.decode_seats import DecodeLoad
from ...consumers.prefill_backlog import PrefillBacklog
from ...schemas.workers import Role, WorkerLoad
from .replay_engine import Job, ReplayEngine
from .replay_result import TokenGaps
from .replay_settings import ReplaySettings

INCARNATION = "0"


class WorkerListener(Protocol):
    def admitted(self, worker: "ReplayWorker", job: Job, now_s: float) -> None: ...

    def first_token(self, worker: "ReplayWorker", job: Job, now_s: float) -> None: ...

    def second_token(self, worker: "ReplayWorker", job: Job, now_s: float) -> None: ...

    def ended(self, worker: "ReplayWorker", job: Job, now_s: float) -> None: ...


class ReplayWorker:
    """`place` in its pool. `agenda_s` and `version` belong to whoever runs it: when it is due next, and which entry counts."""

    def __init__(
        self, name: str, role: Role, place: int, settings: ReplaySettings, listener: WorkerListener, gaps: TokenGaps, step_by_step: bool
    ) -> None:
        self.name = name
        self.role: Role = role
        self.place = place
        self.version = 0
        self.agenda_s = math.inf
        self.taken = 0
        self.promised_blocks = 0
        self._finished = 0
        self._slots = settings.max_sequences
        self._queue: deque[Job] = deque()
        self._sequence = self._fetched_sequence = 0
        self._prompt_tokens = 0
        self._backlog = PrefillBacklog()
        self._keys: dict[int, int] = {}
        self._listener = listener
        num_blocks = (settings.decode_blocks or settings.blocks) if role == "decode" else settings.blocks
        pool = BlockPool(num_blocks, settings.block_size_tokens, record_events=settings.follows_caches and role != "decode")
        self.engine = ReplayEngine(
            role,
            pool,
            settings.timing,
            self,
            gaps,
            max_sequences=settings.max_sequences,
            max_step_tokens=settings.max_step_tokens,
            step_by_step=step_by_step,
        )

    @property
    def free_slots(self) -> int:
        return self._slots - (self.taken - self._finished)

    def may_claim(self, need_blocks: int) -> bool:
        """As the product's decode worker (`consumers.block_ledger`): only what fits to its end, so that nobody is pushed out."""
        return self.free_slots > 0 and self.promised_blocks + need_blocks <= self.engine.pool.num_blocks

    def priority(self, need_blocks: int, is_near: bool) -> int:
        """At which a decode worker asks the broker for a handoff now."""
        running = self.taken - self._finished
        load = DecodeLoad(self.promised_blocks, self.engine.pool.num_blocks, running, self._slots, need_blocks)
        return load.near_priority() if is_near else load.far_priority()

    @property
    def waiting(self) -> int:
        """Routed here and not running: in the queue, or in the engine's own."""
        return len(self._queue) + self.engine.waiting

    def queue(self, job: Job, now_s: float) -> None:
        self._sequence += 1
        job.sequence = self._sequence
        self._queue.append(job)

    def take_jobs(self, now_s: float) -> None:
        while self._queue and self.free_slots > 0:
            job = self._queue.popleft()
            self.taken += 1
            self._fetched_sequence = job.sequence
            self._prompt_tokens += job.prompt_tokens
            self._keys[job.number] = self._backlog.begin(job.expected_new_tokens, now_s)
            self.engine.receive(job, now_s)

    def load(self, now_s: float) -> WorkerLoad:
        return WorkerLoad(
            worker=self.name,
            incarnation=INCARNATION,
            fetched_requests=self.taken,
            finished_requests=self._finished,
            running_requests=self.taken - self._finished,
            running_prompt_tokens=self._prompt_tokens,
            running_new_tokens=self._backlog.new_tokens,
            fetched_sequence=self._fetched_sequence,
            prefill_timing=self._backlog.timing(),
            running_prefills=len(self._backlog),
            prefill_left_s=self._backlog.left_s(now_s),
            used_blocks=self.engine.pool.used_blocks,
            wanted_blocks=self.engine.wanted_blocks(),
            free_slots=self.free_slots,
            room=max(0, self.free_slots),
        )

    # -- what its engine tells ----------------------------------------------------------------------------------------

    def admitted(self, job: Job, now_s: float) -> None:
        self._listener.admitted(self, job, now_s)

    def first_token(self, job: Job, now_s: float) -> None:
        self._backlog.measured(job.prompt_tokens - job.hit_tokens, job.admitted_s, now_s)
        self._backlog.end(self._keys.pop(job.number), now_s)
        self._listener.first_token(self, job, now_s)

    def second_token(self, job: Job, now_s: float) -> None:
        self._listener.second_token(self, job, now_s)

    def ended(self, job: Job, now_s: float) -> None:
        self._finished += 1
        self._prompt_tokens -= job.prompt_tokens
        self._listener.ended(self, job, now_s)
