"""An immutable view of the workers a request could go to, with their load: what policies decide on.

Built from worker cards, load reports and what this router has routed itself. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ..schemas.workers import WorkerCard, WorkerLoad


@dataclass(frozen=True)
class Candidate:
    """A worker that can start a request. `queued_requests`: routed to it and not yet taken by it."""

    lane: str
    worker: str
    role: str
    queued_requests: int
    running_requests: int
    running_prompt_tokens: int
    free_slots: int

    @property
    def load(self) -> int:
        return self.queued_requests + self.running_requests


def reachable(card: WorkerCard, cards: Mapping[str, WorkerCard]) -> bool:
    """Whether what this worker prefills can be finished: by itself, or by a decode worker that has shaken hands with it."""
    if card.role == "aggregated":
        return True
    return card.role == "prefill" and any(
        other.role == "decode" and other.state == "ready" and card.lane in other.peers for other in cards.values()
    )


def candidates(
    model: str, cards: Mapping[str, WorkerCard], loads: Mapping[str, WorkerLoad], routed: Mapping[str, int]
) -> tuple[Candidate, ...]:
    """Ready workers for `model`, by lane. `loads` and `routed` (jobs sent so far) are by lane too."""
    found: list[Candidate] = []
    for card in sorted(cards.values(), key=lambda card: card.lane):
        if card.model != model or card.state != "ready" or not reachable(card, cards):
            continue
        load = loads.get(card.lane)
        found.append(
            Candidate(
                lane=card.lane,
                worker=card.worker,
                role=card.role,
                queued_requests=max(0, routed.get(card.lane, 0) - (load.fetched_requests if load else 0)),
                running_requests=load.running_requests if load else 0,
                running_prompt_tokens=load.running_prompt_tokens if load else 0,
                free_slots=load.free_slots if load else card.capacity_slots,
            )
        )
    return tuple(found)
