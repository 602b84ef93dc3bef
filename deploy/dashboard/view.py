"""From what is known to what is shown. Pure."""

from ...schemas.events import RequestEnded
from ...schemas.timeline import TTFT_STAGES, Stage, ttft_s
from ...schemas.workers import WorkerCard
from .history import MS, SLOT_S, SLOTS, Histogram, History, Slot, place_of
from .picture import Lines, Percentiles, PoolView, QueueView, RequestRow, Snapshot, StageView, Totals, WorkerView
from .pools import LATELY_S, read_pool
from .state import ROLES, Known
from .verdict import findings

WINDOWS_S = (60, 300, 900)
SMOOTH_SLOTS = RATE_SLOTS = 6
"""A point of a line is over so many slots, as `rate(...[30s])` is."""
GAP_STAGES: tuple[Stage, ...] = ("handoff_wait", "transfer", "first_step")


def snapshot(known: Known, history: History, window_s: int = 300, model: str = "", rows: int = 40) -> Snapshot:
    """`model`: times and rates of this one alone; empty: of all."""
    newest = place_of(known.now_ms)
    window_slots = min(SLOTS, max(1, window_s // SLOT_S))
    whole = history.over(newest - window_slots + 1, newest, model)
    lately = history.over(newest - LATELY_S // SLOT_S, newest)
    readings = [read_pool(known, pool) for pool in known.pools]
    by_model = {reading.model: history.over(newest - LATELY_S // SLOT_S, newest, reading.model) for reading in readings}
    rates = history.over(newest - RATE_SLOTS + 1, newest, model)
    return Snapshot(
        now_ms=known.now_ms,
        connected=known.connected,
        window_s=window_slots * SLOT_S,
        model=model,
        models=sorted({card.model for card in known.cards.values()} | set(history.models)),
        findings=findings(known, readings, lately, by_model),
        queues=[QueueView(name, count.pending, count.in_progress) for name, count in known.requests().items()],
        durable_jobs=known.durable_jobs,
        dead_letters=known.dead_letters,
        routers=[{"name": router.name, "policy": router.policy} for router in known.routers],
        pools=[_pool(known, reading.pool, tuple(reading.short(by_model[reading.model]))) for reading in readings],
        totals=_totals(whole, rates, covered_s(known.now_ms, RATE_SLOTS)),
        lines=_lines(history, newest, window_slots, model),
        requests=[row for event in history.recent if not model or event.model == model for row in [_row(event)]][:rows],
    )


def covered_s(now_ms: int, slots: int) -> float:
    """The length of so many slots, the present one of which is not over."""
    return max(1.0, (slots - 1) * SLOT_S + (now_ms * MS) % SLOT_S)


def _pool(known: Known, pool: str, short: tuple[str, ...]) -> PoolView:
    by_role = {role: [_worker(known, card) for card in known.workers(role, pool)] for role in ROLES}
    first = next(card for card in known.cards.values() if card.pool == pool)
    return PoolView(
        pool=pool,
        model=first.model,
        engine=first.compatibility.engine,
        handoffs_waiting=known.handoffs(pool),
        handoffs_held=sum(worker.held_handoffs for worker in by_role["prefill"]),
        short=short,
        prefill=by_role["prefill"],
        decode=by_role["decode"],
        aggregated=by_role["aggregated"],
    )


def _worker(known: Known, card: WorkerCard) -> WorkerView:
    load = known.load(card)
    return WorkerView(
        worker=card.worker,
        incarnation=card.incarnation,
        role=card.role,
        state=card.state,
        told=card.lane in known.loads,
        waiting=known.jobs(card),
        running=load.running_requests,
        slots=card.capacity_slots,
        used_blocks=load.used_blocks,
        held_blocks=load.held_blocks,
        wanted_blocks=load.wanted_blocks,
        blocks=card.capacity_blocks,
        held_handoffs=load.held_handoffs,
        prefill_left_s=load.prefill_left_s,
        peers=len(card.peers),
        domain=card.domain,
    )


def _percentiles(times: Histogram) -> Percentiles:
    return Percentiles(times.count, times.mean_s, times.quantile_s(0.5), times.quantile_s(0.9), times.quantile_s(0.99))


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _totals(whole: Slot, lately: Slot, span_s: float) -> Totals:
    def means(stages: tuple[Stage, ...]) -> list[StageView]:
        return [StageView(stage, mean_s) for stage in stages if (mean_s := whole.stage_mean_s(stage)) is not None]

    return Totals(
        requests_per_s=lately.requests / span_s,
        ended=dict(whole.ended),
        prompt_tokens_per_s=lately.prompt_tokens / span_s,
        output_tokens_per_s=lately.completion_tokens / span_s,
        attempts_mean=whole.attempts / whole.requests if whole.requests else None,
        reuse_real=_share(whole.cached_tokens, whole.prompt_tokens),
        reuse_predicted=_share(whole.predicted_tokens, whole.prompt_tokens),
        moved_bytes_per_s=lately.moved_bytes / span_s,
        transfer_s=whole.stage_mean_s("transfer"),
        bytes_per_transfer=whole.moved_bytes / whole.moved if whole.moved else None,
        ttft=_percentiles(whole.ttft),
        itl=_percentiles(whole.itl),
        ttft_stages=means(TTFT_STAGES),
        gap_stages=means(GAP_STAGES),
    )


def _lines(history: History, newest: int, slots: int, model: str) -> Lines:
    """Without the present slot, which is not over."""
    lines = Lines()
    for place in range(newest - slots, newest):
        one, smooth = history.over(place, place, model), history.over(place - SMOOTH_SLOTS + 1, place, model)
        gauges = history.gauges(place)
        lines.time_s.append((place + 1) * SLOT_S)
        lines.ttft_p50_s.append(smooth.ttft.quantile_s(0.5))
        lines.ttft_p99_s.append(smooth.ttft.quantile_s(0.99))
        lines.itl_p50_s.append(smooth.itl.quantile_s(0.5))
        lines.itl_p99_s.append(smooth.itl.quantile_s(0.99))
        lines.requests_per_s.append(one.requests / SLOT_S)
        lines.output_tokens_per_s.append(one.completion_tokens / SLOT_S)
        lines.prompt_tokens_per_s.append(one.prompt_tokens / SLOT_S)
        lines.reuse_real.append(_share(smooth.cached_tokens, smooth.prompt_tokens))
        lines.reuse_predicted.append(_share(smooth.predicted_tokens, smooth.prompt_tokens))
        lines.moved_bytes_per_s.append(one.moved_bytes / SLOT_S)
        lines.waiting_prefill.append(gauges.waiting_requests + gauges.waiting_jobs if gauges else None)
        lines.waiting_decode.append(gauges.waiting_handoffs if gauges else None)
    return lines


def _row(event: RequestEnded) -> RequestRow:
    begun, ended = event.times_ms.get("received"), event.times_ms.get("ended")
    return RequestRow(
        id=event.id,
        model=event.model,
        outcome=event.outcome,
        code=event.code or event.finish_reason,
        ended_ms=event.ended_ms,
        prompt_tokens=event.prompt_tokens,
        cached_tokens=event.cached_tokens,
        completion_tokens=event.completion_tokens,
        ttft_s=ttft_s(event.times_ms, MS),
        total_s=(ended - begun) * MS if begun is not None and ended is not None else None,
        attempt=event.attempt,
        prefill_worker=event.prefill_worker,
        decode_worker=event.decode_worker,
    )
