"""Replays a trace on a virtual clock, through the product's own policies, prefix index, block pool and ledger, with simulated engines.

One loop over four kinds of events, in order of time: requests that arrive, engines that end a step, words of workers that reach the
router, transfers that end. Deterministic for a seed: what happens at the same time happens in a fixed order.
"""

import heapq
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...consumers.block_pool import PoolEvents
from ...schemas.blocks import block_count
from ...schemas.workers import Role, WorkerLoad
from .replay_engine import Job
from .replay_links import Link, Links
from .replay_result import ReplayResult, RequestRecord, TokenGaps
from .replay_router import ReplayRouter
from .replay_sampler import Sampler
from .replay_settings import ReplaySettings
from .replay_worker import ReplayWorker
from .trace import Trace, TraceRequest, prompt_hashes

__all__ = ["Link", "ReplaySettings", "replay"]

PROGRESS_EVERY = 200


@dataclass(slots=True)
class _Transfer:
    job: Job
    source: ReplayWorker
    held: Job
    target: ReplayWorker
    wanted_s: float


@dataclass(slots=True)
class _Handoff:
    """Waits in the pool's queue for a decode worker with room."""

    number: int
    source: ReplayWorker
    held: Job
    since_s: float


def replay(
    trace: Trace,
    settings: ReplaySettings,
    progress: Callable[[float], None] | None = None,
    *,
    step_by_step: bool = False,
) -> ReplayResult:
    """`progress` is told the part done, 0 to 1, now and then. Raises SetupError for a trace whose grain is not a whole number of blocks.

    `step_by_step`: never take several decode steps at once, which gives the same and takes far longer.
    """
    started_s = time.perf_counter()
    run = _Replay(trace, settings, step_by_step)
    run.run(progress)
    result = run.result()
    result.wall_s = time.perf_counter() - started_s
    return result


class _Replay:
    """The listener of all workers too."""

    def __init__(self, trace: Trace, settings: ReplaySettings, step_by_step: bool) -> None:
        self._trace = trace
        self._settings = settings
        self._hashes: list[Sequence[int]] = list(prompt_hashes(trace, settings.block_size_tokens))
        self._records = [RequestRecord(one.at_s, one.input_tokens, one.output_tokens) for one in trace.requests]
        self._gaps = TokenGaps()
        self._now_s = 0.0
        self._workers = self._make_workers(step_by_step)
        self._by_name = {worker.name: worker for worker in self._workers}
        self._decode = deque(worker for worker in self._workers if worker.role == "decode")
        self._router = ReplayRouter(settings, [(worker.name, worker.role) for worker in self._workers])
        self._links = Links(settings.link)
        self._link_event_s = math.inf
        self._router_event_s = math.inf
        self._handoffs: deque[_Handoff] = deque()
        self._transfers: dict[int, _Transfer] = {}
        self._agenda: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = 0
        self._sampler = Sampler(self._workers, self._links, trace.requests[-1].at_s if trace.requests else 0.0, self._handoffs)

    def _make_workers(self, step_by_step: bool) -> list[ReplayWorker]:
        settings = self._settings
        pools: list[tuple[Role, int]] = [("aggregated", settings.aggregated), ("prefill", settings.prefill), ("decode", settings.decode)]
        names: list[tuple[str, Role, int]] = [(f"{role}-{place}", role, place) for role, count in pools for place in range(count)]
        return [ReplayWorker(name, role, place, settings, self, self._gaps, step_by_step) for name, role, place in names]

    # -- the loop -----------------------------------------------------------------------------------------------------

    def run(self, progress: Callable[[float], None] | None) -> None:
        arrivals = self._trace.requests
        place, agenda, sampler = 0, self._agenda, self._sampler
        while place < len(arrivals) or agenda:
            arrival_s = arrivals[place].at_s if place < len(arrivals) else math.inf
            event_s = agenda[0][0] if agenda else math.inf
            now_s = min(arrival_s, event_s)
            if now_s >= sampler.next_s:
                sampler.sample(now_s)
            self._now_s = now_s
            if arrival_s <= event_s:
                self._arrive(place, now_s)
                place += 1
                if progress is not None and place % PROGRESS_EVERY == 0:
                    progress(place / len(arrivals))
            else:
                heapq.heappop(agenda)[2](now_s)
        if progress is not None:
            progress(1.0)

    def _at(self, at_s: float, action: Callable[[float], None]) -> None:
        self._order += 1
        heapq.heappush(self._agenda, (at_s, self._order, action))

    def _arrive(self, number: int, now_s: float) -> None:
        request, record, hashes = self._trace.requests[number], self._records[number], self._hashes[number]
        too_long = self._too_long(number)
        if too_long:
            record.error = too_long
            record.end_s = now_s
            return
        self._router.receive(number, request.input_tokens, hashes, request.session, now_s)
        self._sampler.kept(self._router.kept, now_s)
        self._follow_router(now_s)

    def _follow_router(self, now_s: float) -> None:
        if self._router.due_s < self._router_event_s:
            self._router_event_s = max(now_s, self._router.due_s)
            self._at(self._router_event_s, self._decide)

    def _decide(self, now_s: float) -> None:
        if now_s < self._router_event_s:
            return  # it decided meanwhile
        self._router_event_s = math.inf
        for routing in self._router.decide(now_s):
            number, worker = routing.number, self._by_name[routing.worker]
            request, record = self._trace.requests[number], self._records[number]
            record.prefill_worker = worker.name
            record.predicted_cached_tokens = routing.cached_tokens
            output_tokens = 1 if worker.role == "prefill" else request.output_tokens
            hashes = self._hashes[number]
            worker.queue(Job(number, request.input_tokens, output_tokens, hashes, expected_new_tokens=routing.new_tokens), now_s)
            self._follow(worker, now_s)
        self._sampler.kept(self._router.kept, now_s)
        self._follow_router(now_s)

    def _too_long(self, number: int) -> str:
        """Every worker of a role has as many blocks as the others."""
        request = self._trace.requests[number]
        for worker in self._workers:
            job = Job(number, request.input_tokens, request.output_tokens, ())
            if not worker.engine.fits_ever(job):
                size, blocks = worker.engine.pool.block_size_tokens, worker.engine.pool.num_blocks
                tokens = request.input_tokens + request.output_tokens
                return f"{tokens} tokens do not fit: {worker.name} has {blocks} blocks of {size}"
        return ""

    def _run_worker(self, worker: ReplayWorker, version: int, now_s: float) -> None:
        if version == worker.version:
            worker.engine.run(now_s)
            self._follow(worker, now_s)

    def _follow(self, worker: ReplayWorker, now_s: float) -> None:
        """After anything that changed this worker: its next step goes on the agenda, and what it has to tell to the router."""
        worker.take_jobs(now_s)
        next_s = worker.engine.next_s
        if next_s != worker.agenda_s:
            worker.agenda_s = next_s
            worker.version += 1
            if next_s < math.inf:
                version = worker.version
                self._at(max(next_s, now_s), lambda at_s: self._run_worker(worker, version, at_s))
        if worker.role != "decode":
            self._tell(worker, now_s)
        self._sampler.changed(worker, now_s)

    def _tell(self, worker: ReplayWorker, now_s: float) -> None:
        load, events = worker.load(now_s), worker.engine.pool.take_events()
        lag_s = self._settings.event_lag_s
        if lag_s:
            self._at(now_s + lag_s, lambda at_s: self._heard(worker, load, events, at_s))
        else:
            self._heard(worker, load, events, now_s)

    def _heard(self, worker: ReplayWorker, load: WorkerLoad, events: PoolEvents, now_s: float) -> None:
        self._router.heard_load(load, now_s)
        self._router.heard_events(worker.name, events)
        self._follow_router(now_s)

    # -- what engines tell --------------------------------------------------------------------------------------------

    def admitted(self, worker: ReplayWorker, job: Job, now_s: float) -> None:
        self._records[job.number].cached_tokens = job.hit_tokens
        self._sampler.prefilled(job.prompt_tokens, job.hit_tokens)

    def first_token(self, worker: ReplayWorker, job: Job, now_s: float) -> None:
        self._records[job.number].first_token_s = now_s

    def second_token(self, worker: ReplayWorker, job: Job, now_s: float) -> None:
        record = self._records[job.number]
        record.second_token_s = now_s
        if job.is_pulled:
            self._gaps.add(now_s - record.first_token_s)

    def ended(self, worker: ReplayWorker, job: Job, now_s: float) -> None:
        record, request = self._records[job.number], self._trace.requests[job.number]
        if worker.role == "prefill" and request.output_tokens > 1:
            self._handoffs.append(_Handoff(job.number, worker, job, now_s))
            self._at(now_s, self._claim)
            return
        if worker.role == "prefill":
            worker.engine.release(job, now_s)
        record.end_s = now_s
        record.decode_worker = worker.name
        if worker.role == "decode":
            worker.promised_blocks -= self._need_blocks(request)
            if self._handoffs:
                self._at(now_s, self._claim)

    # -- from prefill to decode ---------------------------------------------------------------------------------------

    def _claim(self, now_s: float) -> None:
        """The oldest handoff goes to the decode worker with room that the broker would serve first: by priority, then who waited longest."""
        link = self._settings.link
        while self._handoffs:
            handoff = self._handoffs[0]
            request = self._trace.requests[handoff.number]
            job = Job(handoff.number, request.input_tokens, request.output_tokens, self._hashes[handoff.number])
            need_blocks = self._need_blocks(request)
            near = link.domain(handoff.source.place)
            able = [worker for worker in self._decode if worker.may_claim(need_blocks)]
            able.sort(key=lambda worker: worker.priority(need_blocks, is_near=link.domain(worker.place) == near))
            taker = next((worker for worker in able if worker.engine.reserve(job, now_s)), None)
            if taker is None:
                return
            self._handoffs.popleft()
            self._decode.remove(taker)
            self._decode.append(taker)
            self._pull(_Transfer(job, handoff.source, handoff.held, taker, now_s), now_s)
            record = self._records[handoff.number]
            record.decode_worker = taker.name
            record.handoff_wait_s = now_s - handoff.since_s
            taker.taken += 1
            taker.promised_blocks += need_blocks
            self._follow(taker, now_s)

    def _need_blocks(self, request: TraceRequest) -> int:
        """Prompt and whole answer."""
        return block_count(request.input_tokens + request.output_tokens, self._settings.block_size_tokens)

    def _pull(self, transfer: _Transfer, now_s: float) -> None:
        link = self._settings.link
        starts_s = now_s + link.latency_s
        tokens = transfer.job.prompt_tokens - transfer.job.hit_tokens
        num_bytes = float(tokens * link.kv_bytes_per_token)
        self._transfers[transfer.job.number] = transfer
        source, target = link.domain(transfer.source.place), link.domain(transfer.target.place)
        if num_bytes and math.isfinite(link.speed(link.name(source, target))):
            self._at(starts_s, lambda at_s: self._start_transfer(transfer, source, target, num_bytes, at_s))
        else:
            self._at(starts_s, lambda at_s: self._end_transfer(transfer, at_s))

    def _start_transfer(self, transfer: _Transfer, source: str, target: str, num_bytes: float, now_s: float) -> None:
        self._links.start(transfer.job.number, source, target, num_bytes, now_s)
        self._follow_links()

    def _follow_links(self) -> None:
        next_s = self._links.next_end_s()
        if next_s != self._link_event_s:
            self._link_event_s = next_s
            if next_s < math.inf:
                self._at(next_s, self._end_transfers)

    def _end_transfers(self, now_s: float) -> None:
        if now_s < self._link_event_s:
            return  # another one started since
        for number in self._links.ended(now_s):
            self._end_transfer(self._transfers[number], now_s)
        self._follow_links()

    def _end_transfer(self, transfer: _Transfer, now_s: float) -> None:
        del self._transfers[transfer.job.number]
        self._records[transfer.job.number].transfer_s = now_s - transfer.wanted_s
        transfer.source.engine.release(transfer.held, now_s)
        transfer.target.engine.arrived(transfer.job, now_s)
        self._follow(transfer.source, now_s)
        self._follow(transfer.target, now_s)

    # -- the end ------------------------------------------------------------------------------------------------------

    def result(self) -> ReplayResult:
        ended_s = max((record.end_s for record in self._records), default=0.0)
        return ReplayResult(
            configuration=self._settings.described(),
            trace_name=self._trace.name,
            requests=self._records,
            series=self._sampler.series,
            token_gaps=self._gaps,
            queue_depth=self._sampler.queue_depth(self._now_s),
            preemptions=sum(worker.engine.preemptions for worker in self._workers),
            duration_s=max(0.0, ended_s),
        )
