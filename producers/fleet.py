"""An immutable view of the workers a request could go to, with their load: what policies decide on.

Built from worker cards, load reports and the ledger of what was routed and is not fetched yet. Pure. `candidates` says what the
view is; `Fleet` keeps it, so that a decision costs what changed since the last one and not the size of the fleet.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from ..schemas.blocks import block_count
from ..schemas.workers import PrefillTiming, WorkerCard, WorkerLoad
from .lane_ledger import LaneLedger
from .near_decode import Domain, domains_with_room, is_far

DEFAULT_TIMING = PrefillTiming(base_s=0.02, per_token_s=0.0001)
"""Until a worker has told its own: about an 8B model on one large GPU. Only its shape matters then, as all workers share it."""


@dataclass(slots=True)
class Candidate:
    """A worker that can start a request. Never changed once made; not frozen, since that makes making one three times as slow.

    `queued_*`: routed to it and not yet taken by it. `prefill_left_s`: what the worker expected of the prefills in its hands at
    `told_s`. `free_blocks` are KV blocks that neither are in use nor wanted by a job there: below 0 when more are wanted than there are.

    `sent_s`: when the last job was sent there.

    `is_far`: no decode worker of its topology domain has room, and one of another has.

    One object serves many decisions: what does not depend on the request belongs here, computed once. `load` is all requests there.
    """

    lane: str
    worker: str
    role: str
    queued_requests: int
    running_requests: int
    running_prompt_tokens: int
    free_slots: int
    queued_work_s: float = 0.0
    prefill_left_s: float = 0.0
    told_s: float = 0.0
    running_prefills: int = 0
    capacity_blocks: int = 0
    free_blocks: int = 0
    timing: PrefillTiming = DEFAULT_TIMING
    is_far: bool = False
    sent_s: float = -math.inf
    load: int = field(init=False)
    prefill_base_s: float = field(init=False)
    prefill_per_token_s: float = field(init=False)
    used_blocks: int = field(init=False)

    def __post_init__(self) -> None:
        self.prefill_base_s = self.timing.base_s
        self.prefill_per_token_s = self.timing.per_token_s
        self.load = self.queued_requests + self.running_requests
        self.used_blocks = self.capacity_blocks - self.free_blocks

    def work_s(self, now_s: float) -> float:
        """Expected seconds until what is queued and running there is prefilled."""
        left_s = self.prefill_left_s - (now_s - self.told_s)
        return self.queued_work_s + left_s if left_s > 0.0 else self.queued_work_s

    def prefill_s(self, query: "Asked") -> float:
        return self.prefill_base_s + self.prefill_per_token_s * (query.prompt_length_tokens - query.cached_tokens(self.lane))

    def and_one(self, query: "Asked", now_s: float) -> "Candidate":
        """With one more request queued."""
        made = self.promised(query)
        made.queued_work_s, made.sent_s = self.queued_work_s + self.prefill_s(query), now_s
        return made

    def promised(self, query: "Asked", *, taken_back: bool = False) -> "Candidate":
        """With one more request that will have its room, after all others that are still to come; or with that taken back."""
        sign = -1 if taken_back else 1
        new_blocks = block_count(query.prompt_length_tokens - query.cached_tokens(self.lane), query.block_size_tokens)
        # Made several times for each request that waits, in every plan. `replace` looks at all fields, and takes four times as long.
        return Candidate(
            self.lane,
            self.worker,
            self.role,
            self.queued_requests + sign,
            self.running_requests,
            self.running_prompt_tokens,
            self.free_slots,
            self.queued_work_s,
            self.prefill_left_s,
            self.told_s,
            self.running_prefills,
            self.capacity_blocks,
            self.free_blocks - sign * new_blocks,
            self.timing,
            self.is_far,
            self.sent_s,
        )


class Asked(Protocol):
    """What a candidate must know of a request."""

    @property
    def prompt_length_tokens(self) -> int: ...

    @property
    def block_size_tokens(self) -> int: ...

    def cached_tokens(self, lane: str) -> int: ...


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
    shared = quickest_timing(model, cards, loads)
    told = [(card, loads.get(card.lane)) for card in startable(model, cards, direct)]
    with_room = domains_with_room(cards, loads)
    return tuple(
        _candidate(card, load, ledger, (load.prefill_timing if load else None) or shared, 0.0, is_far(card, with_room))
        for card, load in told
    )


def startable(model: str, cards: Mapping[str, WorkerCard], direct: bool) -> list[WorkerCard]:
    """Who could start a request for `model`, in the order of their lanes."""
    return [
        card
        for card in sorted(cards.values(), key=lambda card: card.lane)
        if card.model == model and card.state == "ready" and (reachable(card, cards) or (direct and card.role == "decode"))
    ]


def quickest_timing(model: str, cards: Mapping[str, WorkerCard], loads: Mapping[str, WorkerLoad]) -> PrefillTiming:
    """The quickest that workers of this model have told: the best guess for those that have not."""
    told = [load.prefill_timing for card in cards.values() if card.model == model and (load := loads.get(card.lane))]
    return min((timing for timing in told if timing is not None), key=lambda timing: timing.seconds(1000), default=DEFAULT_TIMING)


def _candidate(card: WorkerCard, load: WorkerLoad | None, ledger: LaneLedger, timing: PrefillTiming, told_s: float, far: bool) -> Candidate:
    lane = card.lane
    return Candidate(
        lane=lane,
        worker=card.worker,
        role=card.role,
        queued_requests=ledger.queued_requests(lane),
        queued_work_s=ledger.queued_work_s(lane),
        running_requests=load.running_requests if load else 0,
        running_prompt_tokens=load.running_prompt_tokens if load else 0,
        prefill_left_s=load.prefill_left_s if load else 0.0,
        told_s=told_s,
        running_prefills=load.running_prefills if load else 0,
        capacity_blocks=card.capacity_blocks,
        free_blocks=card.capacity_blocks - (load.used_blocks + load.wanted_blocks if load else 0),
        free_slots=load.free_slots if load else card.capacity_slots,
        timing=timing,
        is_far=far,
        sent_s=ledger.booked_s(lane),
    )


@dataclass
class _View:
    """Who could start a request for one model, while the cards stay as they are. `candidates` is None when one of them changed."""

    lanes: list[str]
    candidates: tuple[Candidate, ...] | None = None


class Fleet:
    """`candidates(...)` of the latest cards and loads, at any time. Candidates are made again only for lanes of which something changed.

    Loads come in by `loaded`, queues by the ledger's `changed` set, which this is the one reader of.
    """

    def __init__(self, ledger: LaneLedger) -> None:
        self._ledger = ledger
        self._loads: dict[str, WorkerLoad] = {}
        self._told_s: dict[str, float] = {}
        self._cards: Mapping[str, WorkerCard] = {}
        self._views: dict[tuple[str, bool], _View] = {}
        self._seen: dict[str, WorkerCard] = {}
        self._made: dict[str, Candidate] = {}
        self._guessed: set[str] = set()
        self._quickest: dict[str, PrefillTiming] = {}
        self._with_room: frozenset[Domain] = frozenset()
        self._decoding: frozenset[str] = frozenset()

    @property
    def loads(self) -> Mapping[str, WorkerLoad]:
        """By lane."""
        return self._loads

    def loaded(self, lane: str, load: WorkerLoad, now_s: float = 0.0) -> bool:
        """Whether a candidate changes by it: not so where a decode worker tells its load and still has room, or still has none.

        `now_s`: on the clock that decisions are made by.
        """
        known = self._loads.get(lane)
        self._loads[lane] = load
        self._told_s[lane] = now_s
        changed = {lane} & self._seen.keys()
        if (known.prefill_timing if known else None) != load.prefill_timing:
            self._quickest.clear()
            changed |= self._guessed
        if lane in self._decoding and (with_room := domains_with_room(self._cards, self._loads)) != self._with_room:
            self._with_room = with_room
            changed |= self._seen.keys()
        self._ledger.changed |= changed
        return bool(changed)

    def forget(self, lane: str) -> WorkerLoad | None:
        """What it told last, if anything."""
        self._told_s.pop(lane, None)
        last = self._loads.pop(lane, None)
        self._start_anew()
        return last

    def candidates(self, model: str, cards: Mapping[str, WorkerCard], *, direct: bool = False) -> tuple[Candidate, ...]:
        """`cards` must be a new object whenever it says something new, as the registry's is."""
        if cards is not self._cards:
            self._cards = cards
            self._decoding = frozenset(card.lane for card in cards.values() if card.role == "decode")
            self._start_anew()
        if self._ledger.changed:
            self._remake_changed()
        view = self._views.get((model, direct))
        if view is None:
            view = self._views[model, direct] = self._look(model, direct)
        if view.candidates is None:
            view.candidates = tuple(map(self._made.__getitem__, view.lanes))
        return view.candidates

    def _look(self, model: str, direct: bool) -> _View:
        cards = {card.lane: card for card in startable(model, self._cards, direct)}
        for lane in cards.keys() - self._seen.keys():
            self._seen[lane] = cards[lane]
            self._make(lane)
        return _View(list(cards))

    def _make(self, lane: str) -> None:
        card, load = self._seen[lane], self._loads.get(lane)
        timing = load.prefill_timing if load else None
        if timing is None:
            self._guessed.add(lane)
            timing = self._quickest.get(card.model)
            if timing is None:
                timing = self._quickest[card.model] = quickest_timing(card.model, self._cards, self._loads)
        self._made[lane] = _candidate(card, load, self._ledger, timing, self._told_s.get(lane, 0.0), is_far(card, self._with_room))

    def _remake_changed(self) -> None:
        self._guessed -= self._ledger.changed
        for lane in self._ledger.changed & self._seen.keys():
            self._make(lane)
        self._ledger.changed.clear()
        for view in self._views.values():
            view.candidates = None

    def _start_anew(self) -> None:
        self._with_room = domains_with_room(self._cards, self._loads)
        for known in (self._views, self._seen, self._made, self._guessed, self._quickest):
            known.clear()
