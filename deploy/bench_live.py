"""`jetwake bench live`: sends a trace to a running system at the trace's own times, and fills the same records as a replay.

Requests go out when the trace says, whatever became of those before; latencies count from that time, so that a client that
comes late does not make the system look fast. `transfer_s` is what the client sees of a handoff: the time from the first token to the second, less
the mean time between the later ones.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from statistics import quantiles

from ..pipeline.connection import Bus
from ..pipeline.settings import BrokerSettings
from ..schemas.errors import JetwakeError, SetupError
from ..schemas.workers import WorkerCard
from .capacity.live_prompts import LivePrompts, live_prompts
from .capacity.profiles import Profile
from .capacity.replay_result import ReplayResult, RequestRecord, Series, TokenGaps
from .capacity.replay_settings import ReplaySettings
from .capacity.trace import Trace, TraceRequest
from .capacity.trace_slice import rate_per_s
from .live_load import LiveLoad
from .live_senders import LiveModel, Sender, Sent, http_sender, nats_sender

PREPARED_AHEAD_S = 1.0
"""Prompts are made so long before their time, so that making them costs no lateness."""


@dataclass(frozen=True)
class LivePlan:
    """`http`: the URL of an OpenAI endpoint; empty: NATS. `scale` 0: as the model's limit allows."""

    model: str | None = None
    http: str = ""
    scale: float = 0.0
    seed: int = 0
    timeout_s: float = 600.0


@dataclass(frozen=True)
class Live:
    """`trace`: as it was sent, scaled. `fleet`: the workers that served it; empty where nobody watched."""

    result: ReplayResult
    trace: Trace
    model: LiveModel
    fleet: Sequence[WorkerCard]

    def settings(self, profile: Profile, policy: str) -> ReplaySettings:
        """Of a replay on the same fleet. Raises SetupError for a fleet that a replay does not know."""
        if not self.fleet:
            raise SetupError("the fleet is not known: give --nats-url too")
        counts = Counter(card.role for card in self.fleet)
        blocks = {card.role: card.capacity_blocks for card in self.fleet}
        return ReplaySettings(
            aggregated=counts["aggregated"],
            prefill=counts["prefill"],
            decode=counts["decode"],
            policy=policy,
            block_size_tokens=self.model.block_size_tokens,
            blocks=blocks.get("prefill") or blocks.get("aggregated", 0),
            decode_blocks=blocks.get("decode", 0),
            max_sequences=max(card.capacity_slots for card in self.fleet),
            timing=profile.timing,
            profile=profile.name,
        )


@dataclass
class _Arrivals:
    """When tokens came, and how many."""

    at_s: list[float] = field(default_factory=list[float])
    counts: list[int] = field(default_factory=list[int])


class LiveBench:
    """One run of a trace."""

    def __init__(self, trace: Trace, sender: Sender, prompts: LivePrompts, progress: Callable[[float], None]) -> None:
        self.gaps = TokenGaps()
        self.lateness_s = list[float]()
        self._trace = trace
        self._sender = sender
        self._prompts = prompts
        self._progress = progress
        self._ended = 0
        self._start_s = math.inf

    def since_start_s(self) -> float:
        """Below 0 before the start."""
        return time.perf_counter() - self._start_s

    async def run(self) -> list[RequestRecord]:
        """In the order of the trace."""
        await self._sender.send([1], 2, lambda _: None)  # connections are open now, and the model is known
        self._start_s = time.perf_counter() + PREPARED_AHEAD_S - self._trace.requests[0].at_s
        async with asyncio.TaskGroup() as tasks:
            sent = list[asyncio.Task[RequestRecord]]()
            for request in self._trace.requests:
                await asyncio.sleep(max(0.0, request.at_s - PREPARED_AHEAD_S - self.since_start_s()))
                sent.append(tasks.create_task(self._one(request, self._prompts.prompt(request))))
        return [task.result() for task in sent]

    async def _one(self, request: TraceRequest, prompt: list[int]) -> RequestRecord:
        record = RequestRecord(request.at_s, len(prompt), self._prompts.output_tokens(request))
        await asyncio.sleep(max(0.0, request.at_s - self.since_start_s()))
        self.lateness_s.append(self.since_start_s() - request.at_s)
        arrivals = _Arrivals()

        def note(count: int) -> None:
            arrivals.at_s.append(self.since_start_s())
            arrivals.counts.append(count)

        try:
            sent = await self._sender.send(prompt, record.output_tokens, note)
        except JetwakeError as error:
            record.error = f"{error.code}: {error}"
        else:
            _complete(record, sent, arrivals, self.gaps)
        record.first_token_s = arrivals.at_s[0] if arrivals.at_s else -1.0
        record.end_s = self.since_start_s()
        self._ended += 1
        self._progress(self._ended / len(self._trace.requests))
        return record


def _complete(record: RequestRecord, sent: Sent, arrivals: _Arrivals, gaps: TokenGaps) -> None:
    record.output_tokens = sent.output_tokens
    record.cached_tokens, record.predicted_cached_tokens = sent.cached_tokens, sent.predicted_cached_tokens
    record.prefill_worker, record.decode_worker = sent.prefill_worker, sent.decode_worker
    for place in range(1, len(arrivals.at_s)):  # tokens that came together came at equal steps: only their number is known
        count = arrivals.counts[place]
        gaps.add((arrivals.at_s[place] - arrivals.at_s[place - 1]) / count, count)
    later_tokens = sum(arrivals.counts[2:])
    if sent.prefill_worker != sent.decode_worker and later_tokens:
        step_s = (arrivals.at_s[-1] - arrivals.at_s[1]) / later_tokens
        record.transfer_s = max(0.0, arrivals.at_s[1] - arrivals.at_s[0] - step_s)


async def measure_live(
    trace: Trace, broker: BrokerSettings | None, plan: LivePlan, say: Callable[[str], None], progress: Callable[[float], None]
) -> Live:
    """`broker`: needed without `plan.http`; with it, only to watch the queues (None: they are not watched). Raises SetupError."""
    started_s = time.perf_counter()
    async with _sender(broker, plan) as sender:
        model = sender.model
        prompts = live_prompts(trace, model.vocabulary_size, model.limit_tokens, model.block_size_tokens, plan.scale, plan.seed)
        if prompts.scale != 1:
            say(f"lengths are multiplied by {prompts.scale:.4f}; {model.name} takes {model.limit_tokens:,} tokens")
        bench = LiveBench(trace, sender, prompts, progress)
        async with _watched(broker, bench.since_start_s) as load:
            records = await bench.run()
            fleet = load.workers if load else []
    if not any(record.completed for record in records):
        raise SetupError(f"none of {len(records)} requests completed; the first: {records[0].error}")
    series = load.series if load else Series()
    _note_hits(series, records)
    result = ReplayResult(
        configuration={
            "workers": dict(Counter(card.role for card in fleet)),
            "live": plan.http or "NATS",
            "model": model.name,
            "scale": round(prompts.scale, 4),
            "offered_rate_per_s": round(rate_per_s(trace), 3),
            "lateness_ms_p99": round(_p99(bench.lateness_s) * 1e3, 1),
        },
        trace_name=trace.name,
        requests=records,
        series=series,
        token_gaps=bench.gaps,
        queue_depth=load.queue_depth if load else {},
        duration_s=max(record.end_s for record in records),
        wall_s=time.perf_counter() - started_s,
    )
    return Live(result, prompts.scaled(trace), model, [card for card in fleet if card.model == model.name])


@asynccontextmanager
async def _sender(broker: BrokerSettings | None, plan: LivePlan) -> AsyncGenerator[Sender]:
    async with AsyncExitStack() as stack:
        if plan.http:
            yield await stack.enter_async_context(http_sender(plan.http, plan.model, plan.timeout_s))
        elif broker is None:
            raise SetupError("a live bench needs a broker, or --http URL")
        else:
            yield await stack.enter_async_context(nats_sender(broker, plan.model, plan.timeout_s))


@asynccontextmanager
async def _watched(broker: BrokerSettings | None, since_start_s: Callable[[], float]) -> AsyncGenerator[LiveLoad | None]:
    if broker is None:
        yield None
        return
    async with Bus.connect(broker, name="bench-live") as bus:
        load = LiveLoad(bus, since_start_s)
        watching = asyncio.create_task(load.run())
        try:
            yield load
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
    if not watching.cancelled():
        watching.result()


def _note_hits(series: Series, records: list[RequestRecord]) -> None:
    """Requests count in the interval in which their first token came: a client does not see when a prefill began."""
    series.prompt_tokens, series.cached_tokens = [0] * len(series.at_s), [0] * len(series.at_s)
    began = sorted((record for record in records if record.completed), key=lambda record: record.first_token_s)
    place = 0
    for record in began:
        while place < len(series.at_s) - 1 and series.at_s[place] < record.first_token_s:
            place += 1
        if series.at_s:
            series.prompt_tokens[place] += record.input_tokens
            series.cached_tokens[place] += record.cached_tokens


def _p99(values: list[float]) -> float:
    return quantiles(values, n=100, method="inclusive")[98] if len(values) > 1 else values[0]
