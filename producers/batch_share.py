"""How many batch requests may be routed now: as many as start at once, and hold up no interactive request by more than a moment. Pure.

A prefill that runs cannot be taken back, so what an interactive request may find before it is bounded here: on a worker that has
nothing to prefill, one batch prompt, or as many as are prefilled in `AHEAD_S`. Nor may batch take the last slots of the decode
workers: prefill stops when nobody pulls. While interactive requests come, the last idle prefill worker is left to them.
"""

from collections.abc import Mapping, Sequence

from ..schemas.workers import WorkerCard, WorkerLoad
from .fleet import Candidate

AHEAD_S = 0.02
IDLE_S = 0.002
"""Estimates of a prefill that is all but done are no better."""
LATELY_S = 10.0
"""For so long after an interactive request others are expected."""
DECODE_RESERVE = 8
"""One in so many decode slots stays free of batch."""


def startable(workers: Sequence[Candidate], now_s: float, *, leave_one: bool = False) -> int:
    """On workers that can start a request. `leave_one`: where there are several, one that has nothing to prefill is left alone."""
    counts = [_on(worker, now_s) for worker in workers]
    return sum(counts) - max(counts) if leave_one and len(counts) > 1 else sum(counts)


def _on(worker: Candidate, now_s: float) -> int:
    free = worker.free_slots - worker.queued_requests
    if free <= 0 or worker.work_s(now_s) > IDLE_S:
        return 0
    return min(free, max(1, int(AHEAD_S / max(worker.prefill_base_s, 1e-4)) - worker.queued_requests))


def decode_has_room(cards: Mapping[str, WorkerCard], loads: Mapping[str, WorkerLoad]) -> bool:
    """Whether some decode worker has more free slots than its reserve. True where there is none, or none has told."""
    decoding = [card for card in cards.values() if card.role == "decode" and card.state == "ready"]
    free = [(loads[card.lane].free_slots, card.capacity_slots) for card in decoding if card.lane in loads]
    return not free or any(slots > capacity // DECODE_RESERVE for slots, capacity in free)
