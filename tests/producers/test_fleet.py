"""What is kept between decisions is what would be made anew: the router's view of the workers, the ledger's sums, kv_aware's scores."""

import random
from collections.abc import Mapping
from dataclasses import replace

import pytest

from jetwake.producers.fleet import Candidate, Fleet, candidates
from jetwake.producers.lane_ledger import Booking, LaneLedger
from jetwake.producers.policies import TIE, KvAware, KvAwareKnobs, Query
from jetwake.schemas.workers import KvCompatibility, PrefillTiming, WorkerCard, WorkerLoad

SAME = KvCompatibility(
    engine="e",
    engine_version="1",
    nixl_version="1",
    model="m",
    revision="",
    dtype="f",
    kv_dtype="f",
    block_size_tokens=16,
    tensor_parallel=1,
)
MODELS = ("m", "n")


class Life:
    """A fleet to which everything happens that can, and the plain facts beside it."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.ledger = LaneLedger()
        self.fleet = Fleet(self.ledger)
        self.cards: Mapping[str, WorkerCard] = {}
        self.loads: dict[str, WorkerLoad] = {}
        self.bookings: list[Booking] = []
        self.sequence = 0

    def step(self) -> None:
        self.dice.choice((self.card, self.load, self.load, self.book, self.book, self.fetch, self.withdraw, self.leave))()

    def card(self) -> None:
        number = self.dice.randrange(8)
        role = ("prefill", "prefill", "decode", "aggregated")[number % 4]
        lanes = [f"w{other}-{incarnation}" for other in range(8) for incarnation in (1, 2)]
        fields = {
            "worker": f"w{number}", "incarnation": str(self.dice.randint(1, 2)), "role": role, "model": MODELS[number // 4], "pool": "p",
            "compatibility": SAME, "capacity_blocks": 10, "capacity_slots": 4, "max_model_len_tokens": 100,
            "state": self.dice.choice(("ready", "ready", "draining")), "peers": self.dice.sample(lanes, 8), "domain": self.dice.choice(("", "", "a", "b")),
        }  # fmt: skip
        self.cards = {**self.cards, f"w{number}": WorkerCard.model_validate(fields)}

    def load(self) -> bool:
        worker, incarnation = f"w{self.dice.randrange(8)}", str(self.dice.randint(1, 2))
        timing = PrefillTiming(base_s=0.1, per_token_s=self.dice.choice((0.1, 0.2, 0.3)))
        load = WorkerLoad(
            worker=worker,
            incarnation=incarnation,
            running_requests=self.dice.randrange(4),
            prefill_left_s=self.dice.random(),
            used_blocks=self.dice.randrange(10),
            wanted_blocks=self.dice.randrange(10),
            prefill_timing=self.dice.choice((None, timing)),
            free_slots=self.dice.randrange(4),
            room=self.dice.randrange(2),
        )
        self.loads[f"{worker}-{incarnation}"] = load
        return self.fleet.loaded(f"{worker}-{incarnation}", load)

    def book(self) -> None:
        booking = self.ledger.book("r", f"w{self.dice.randrange(8)}-{self.dice.randint(1, 2)}", self.dice.random())
        self.bookings.append(booking)
        if self.dice.random() < 0.8:
            self.sequence += 1
            self.ledger.stored(booking, self.sequence)

    def fetch(self) -> None:
        self.ledger.fetched(f"w{self.dice.randrange(8)}-{self.dice.randint(1, 2)}", self.dice.randint(0, self.sequence))

    def withdraw(self) -> None:
        if self.bookings:
            self.ledger.withdraw(self.dice.choice(self.bookings))

    def leave(self) -> None:
        worker = f"w{self.dice.randrange(8)}"
        lane = f"{worker}-{self.dice.randint(1, 2)}"
        self.cards = {name: card for name, card in self.cards.items() if name != worker}
        assert self.fleet.forget(lane) == self.loads.pop(lane, None)
        self.ledger.forget(lane)


@pytest.mark.parametrize("seed", range(10))
def test_the_view_that_is_kept_is_the_one_that_would_be_made_anew(seed: int) -> None:
    life, seen = Life(seed), set[str]()
    for _ in range(600):
        life.step()
        if life.dice.random() < 0.7:
            for model, direct in ((model, direct) for model in MODELS for direct in (False, True)):
                kept = life.fleet.candidates(model, life.cards, direct=direct)
                assert kept == candidates(model, life.cards, life.loads, life.ledger, direct=direct)
                seen |= {candidate.lane for candidate in kept}
    assert len(seen) >= 8


@pytest.mark.parametrize("seed", range(10))
def test_a_load_that_is_said_to_change_no_candidate_changes_none(seed: int) -> None:
    life, told = Life(seed), set[bool]()
    for _ in range(600):
        life.step()
        before = {model: life.fleet.candidates(model, life.cards) for model in MODELS}
        changes = life.load()
        told.add(changes)
        after = {model: life.fleet.candidates(model, life.cards) for model in MODELS}
        assert changes or all(after[model] is before[model] for model in MODELS)
    assert told == {True, False}


@pytest.mark.parametrize("seed", range(10))
def test_the_work_that_is_queued_is_the_sum_of_what_is_queued(seed: int) -> None:
    life = Life(seed)
    for _ in range(600):
        life.step()
        for lane in life.ledger.lanes:
            queued = life.ledger.queued(lane)
            assert life.ledger.queued_work_s(lane) == pytest.approx(sum(booking.work_s for booking in queued), abs=1e-12)
            assert life.ledger.queued_requests(lane) == len(queued)


def test_a_candidate_is_made_again_only_when_something_of_it_changed() -> None:
    life = Life(1)
    for name in ("a", "b"):
        fields = {
            "worker": name, "incarnation": "1", "role": "aggregated", "model": "m", "pool": "p", "compatibility": SAME,
            "capacity_blocks": 10, "capacity_slots": 4, "max_model_len_tokens": 100,
        }  # fmt: skip
        life.cards = {**life.cards, name: WorkerCard.model_validate(fields)}
    before = life.fleet.candidates("m", life.cards)
    life.ledger.book("r", "b-1", 0.5)
    after = life.fleet.candidates("m", life.cards)
    assert after[0] is before[0]
    assert (before[1].queued_requests, after[1].queued_requests) == (0, 1)


def test_one_more_or_one_less_changes_nothing_else_of_a_candidate() -> None:
    """All fields unlike their defaults: one that was left out would show."""
    timing = PrefillTiming(base_s=0.5, per_token_s=0.25)
    candidate = Candidate("w-1", "w", "prefill", 2, 3, 400, 5, 6.0, 7.0, 8.0, 9, 100, 60, timing, True, 10.0)
    query = Query("r", 33, 16, {"w-1": 1})  # three blocks, of which one is cached: two are new
    assert candidate.promised(query) == replace(candidate, queued_requests=3, free_blocks=58)
    assert candidate.promised(query, taken_back=True) == replace(candidate, queued_requests=1, free_blocks=62)
    assert candidate.and_one(query, 11.0) == replace(
        candidate, queued_requests=3, free_blocks=58, queued_work_s=6.0 + candidate.prefill_s(query), sent_s=11.0
    )


def expected_s(candidate: Candidate, query: Query, knobs: KvAwareKnobs, now_s: float) -> float:
    """What docs/routing.md says, term by term."""
    most = (query.prompt_length_tokens - 1) // query.block_size_tokens
    cached_tokens = min(query.matched_blocks.get(candidate.lane, 0), most) * query.block_size_tokens
    prefill_s = candidate.timing.seconds(query.prompt_length_tokens - knobs.overlap_weight * cached_tokens)
    running_s = max(0.0, candidate.prefill_left_s - (now_s - candidate.told_s))
    total_s = knobs.load_weight * (candidate.queued_work_s + running_s) + prefill_s
    missing_blocks = max(0, query.prompt_length_tokens // query.block_size_tokens - candidate.free_blocks)
    total_s += knobs.room_wait_s * missing_blocks / candidate.capacity_blocks
    if query.session_lane not in ("", candidate.lane):
        total_s += knobs.session_affinity_s
    if candidate.role == "decode":
        total_s += knobs.interference_weight * candidate.running_requests * prefill_s
    if candidate.role == "prefill" and knobs.direct_max_new_tokens:
        total_s += knobs.handoff_s
    if candidate.role == "prefill" and candidate.is_far:
        total_s += knobs.far_pull_s
    if candidate.role == "aggregated":
        used_tokens = (candidate.capacity_blocks - candidate.free_blocks) * query.block_size_tokens
        total_s += knobs.decode_weight * used_tokens * candidate.timing.per_token_s
    return total_s


@pytest.mark.parametrize("seed", range(20))
def test_kv_aware_scores_what_is_documented_and_takes_the_least(seed: int) -> None:
    dice = random.Random(seed)
    lanes = [f"w{number}" for number in range(12)]
    for _ in range(20):
        knobs = KvAwareKnobs(
            dice.choice((0.0, 0.5, 1.0)), dice.choice((0.0, 1.0, 2.0)), 0.0, dice.choice((0.0, 0.1)), dice.choice((0, 400))
        )
        fleet = [
            Candidate(
                lane, lane, dice.choice(("prefill", "decode", "aggregated")), dice.randrange(3), dice.randrange(3), 0, 4, dice.random() / 9,
                dice.random() / 9, 5.0 + dice.random() / 9, dice.randrange(3), 100, dice.randrange(-20, 100), PrefillTiming(base_s=dice.random() / 50, per_token_s=dice.random() / 5000),
                dice.random() < 0.5,
            )
            for lane in lanes
        ]  # fmt: skip
        matched = {lane: dice.randrange(1, 66) for lane in dice.sample(lanes, dice.randrange(12))}
        query = Query("r", 1024, 16, matched, dice.choice(("", *lanes)))
        may = [each for each in fleet if each.role != "decode" or 1024 - query.cached_tokens(each.lane) <= knobs.direct_max_new_tokens]
        decision = KvAware(seed, knobs).choose(fleet, query, 5.1)
        assert decision.scores == pytest.approx({each.lane: expected_s(each, query, knobs, 5.1) for each in may or fleet})
        assert decision.scores[decision.lane] <= min(decision.scores.values()) * (1 + TIE)
