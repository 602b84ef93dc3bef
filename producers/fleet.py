"""An immutable view of the workers a request could go to, with their load: what policies decide on.

Built from worker cards, load reports and the ledger of what was routed and is not fetched yet. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ..schemas.workers import PrefillTiming, WorkerCard, WorkerLoad
from .lane_ledger import LaneLedger

DEFAULT_TIMING = PrefillTiming(base_s=0.02, per_token_s=0.0001)
"""Until a worker has told its own: about an 8B model on one large GPU. Only its shape matters then, as all workers share it."""


@dataclass(frozen=True)
class Candidate:
    """A worker that can start a request. `queued_*`: routed to it and not yet taken by it."""

    lane: str
    worker: str
    role: str
    queued_requests: int
    running_requests: int
    running_prompt_tokens: int
    free_slots: int
    queued_work_s: float = 0.0
    running_new_tokens: int = 0
    timing: PrefillTiming = DEFAULT_TIMING

    @property
    def load(self) -> int:
        return self.queued_requests + self.running_requests

    @property
    def work_s(self) -> float:
        """Expected seconds until what is queued and running there is prefilled. What runs is taken as half done."""
        return self.queued_work_s + self.timing.per_token_s * self.running_new_tokens / 2


def reachable(card: WorkerCard, cards: Mapping[str, WorkerCard]) -> bool:
    """Whether what this worker prefills can be finished: by itself, or by a decode worker that has shaken hands with it."""
    if card.role == "aggregated":
        return True
    return card.role == "prefill" and any(
        other.role == "decode" and other.state == "ready" and card.lane in other.peers for other in cards.values()
    )


def candidates(
    model: str, cards: Mapping[str, WorkerCard], loads: Mapping[str, WorkerLoad], ledger: LaneLedger, *, direct: bool = False
) -> tuple[Candidate, ...]:
    """Ready workers for `model`, in the order of their lanes. `loads` is by lane too.

    `direct`: decode workers too, which then do both legs.
    """
    timings = known_timings(model, cards, loads)
    shared = timings[0] if timings else DEFAULT_TIMING
    return tuple(
        _candidate(card, loads.get(card.lane), ledger, shared)
        for card in sorted(cards.values(), key=lambda card: card.lane)
        if card.model == model and card.state == "ready" and (reachable(card, cards) or (direct and card.role == "decode"))
    )


def known_timings(model: str, cards: Mapping[str, WorkerCard], loads: Mapping[str, WorkerLoad]) -> list[PrefillTiming]:
    """What workers of this model have told, the quickest first: the best guess for those that have not."""
    told = [load.prefill_timing for card in cards.values() if card.model == model and (load := loads.get(card.lane))]
    return sorted((timing for timing in told if timing is not None), key=lambda timing: timing.seconds(1000))


def _candidate(card: WorkerCard, load: WorkerLoad | None, ledger: LaneLedger, shared: PrefillTiming) -> Candidate:
    return Candidate(
        lane=card.lane,
        worker=card.worker,
        role=card.role,
        queued_requests=ledger.queued_requests(card.lane),
        queued_work_s=ledger.queued_work_s(card.lane),
        running_requests=load.running_requests if load else 0,
        running_prompt_tokens=load.running_prompt_tokens if load else 0,
        running_new_tokens=load.running_new_tokens if load else 0,
        free_slots=load.free_slots if load else card.capacity_slots,
        timing=(load.prefill_timing if load else None) or shared,
    )
