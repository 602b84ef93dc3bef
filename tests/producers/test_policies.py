"""Policies and the view of the fleet they decide on."""

from dataclasses import replace

import pytest

from jetwake.producers.fleet import Candidate, candidates
from jetwake.producers.lane_ledger import LaneLedger
from jetwake.producers.policies import POLICIES, KvAware, KvAwareKnobs, Query, make_policy
from jetwake.schemas.errors import SetupError
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


def card(worker: str, role: str, **changes: object) -> WorkerCard:
    fields = {
        "worker": worker, "incarnation": "1", "role": role, "model": "m", "pool": "p", "compatibility": SAME,
        "capacity_blocks": 10, "capacity_slots": 4, "max_model_len_tokens": 100,
    }  # fmt: skip
    return WorkerCard.model_validate({**fields, **changes})


def candidate(lane: str, queued: int = 0, running: int = 0, tokens: int = 0) -> Candidate:
    return Candidate(lane, lane, "prefill", queued, running, tokens, 4)


QUERY = Query("r", 100)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_picks_one_of_the_candidates_and_says_why(name: str) -> None:
    fleet = [candidate("a"), candidate("b"), candidate("c")]
    policy = make_policy(name, seed=3)
    for _ in range(20):
        decision = policy.choose(fleet, QUERY)
        assert decision.lane in {"a", "b", "c"}
        assert decision.reason


def test_round_robin_takes_turns() -> None:
    policy = make_policy("round_robin")
    assert [policy.choose([candidate("a"), candidate("b")], QUERY).lane for _ in range(4)] == ["a", "b", "a", "b"]


def test_random_is_the_same_for_the_same_seed_and_reaches_everyone() -> None:
    first, second = ([make_policy("random", 5).choose([candidate("a"), candidate("b")], QUERY).lane] for _ in range(2))
    assert first == second
    policy = make_policy("random", 5)
    assert {policy.choose([candidate("a"), candidate("b")], QUERY).lane for _ in range(50)} == {"a", "b"}


def test_least_loaded_counts_queued_and_running_and_breaks_ties_by_tokens_then_in_turn() -> None:
    policy = make_policy("least_loaded")
    assert policy.choose([candidate("a", queued=2), candidate("b", running=1)], QUERY).lane == "b"
    assert policy.choose([candidate("a", running=1, tokens=900), candidate("b", running=1, tokens=100)], QUERY).lane == "b"
    assert {policy.choose([candidate("a"), candidate("b")], QUERY).lane for _ in range(2)} == {"a", "b"}


def test_an_unknown_policy_is_named_with_those_there_are() -> None:
    with pytest.raises(SetupError, match=r"fastest.*least_loaded"):
        make_policy("fastest")


def test_a_prefill_worker_is_a_candidate_only_when_a_decode_worker_has_greeted_it() -> None:
    prefill, stranger = card("p", "prefill"), card("q", "prefill")
    decode = card("d", "decode", peers=[prefill.lane])
    cards = {each.worker: each for each in (prefill, stranger, decode)}
    assert [found.lane for found in candidates("m", cards, {}, LaneLedger())] == [prefill.lane]
    assert candidates("m", {"p": prefill}, {}, LaneLedger()) == ()


def test_draining_workers_and_other_models_are_no_candidates() -> None:
    cards = {
        "a": card("a", "aggregated"),
        "b": card("b", "aggregated", state="draining"),
        "c": card("c", "aggregated", model="other"),
    }
    assert [found.worker for found in candidates("m", cards, {}, LaneLedger())] == ["a"]


def test_queued_is_what_was_routed_and_not_yet_fetched() -> None:
    cards, ledger = {"a": card("a", "aggregated")}, LaneLedger()
    for sequence in (11, 12, 13):
        ledger.stored(ledger.book(f"r{sequence}", "a-1", 0.5), sequence)
    ledger.fetched("a-1", 11)
    load = WorkerLoad(worker="a", incarnation="1", fetched_requests=3, running_requests=2, prefill_left_s=0.25)
    [found] = candidates("m", cards, {"a-1": load}, ledger)
    assert (found.queued_requests, found.running_requests, found.load) == (2, 2, 4)
    assert found.work_s(0.0) == pytest.approx(2 * 0.5 + 0.25)
    assert found.work_s(0.2) == pytest.approx(2 * 0.5 + 0.05)
    assert found.work_s(9.0) == pytest.approx(2 * 0.5)


def test_a_worker_that_has_told_no_timing_is_taken_for_as_quick_as_the_quickest_that_has() -> None:
    cards = {name: card(name, "aggregated") for name in ("a", "b", "c")}
    slow, quick = PrefillTiming(base_s=0.1, per_token_s=0.01), PrefillTiming(base_s=0.1, per_token_s=0.001)
    loads = {
        "a-1": WorkerLoad(worker="a", incarnation="1", prefill_timing=slow),
        "b-1": WorkerLoad(worker="b", incarnation="1", prefill_timing=quick),
    }
    assert [found.timing for found in candidates("m", cards, loads, LaneLedger())] == [slow, quick, quick]


# -- kv_aware -------------------------------------------------------------------------------------------------------------


def aware(**knobs: float) -> KvAware:
    return KvAware(knobs=KvAwareKnobs(**knobs))


def matched(**blocks: int) -> Query:
    return Query("r", 1600, 16, blocks)


def test_kv_aware_goes_where_the_prefix_is() -> None:
    assert aware().choose([candidate("a"), candidate("b")], matched(b=90)).lane == "b"


def test_kv_aware_leaves_a_cache_whose_worker_is_busier_than_the_saving_is_worth() -> None:
    fleet = [candidate("a"), replace(candidate("b"), queued_requests=9, queued_work_s=5.0)]
    decision = aware().choose(fleet, matched(b=90))
    assert decision.lane == "a"
    assert decision.scores["b"] > decision.scores["a"]
    assert "0 of 1600 tokens cached" in decision.reason


def test_kv_aware_spreads_over_workers_that_are_all_idle_and_cold() -> None:
    policy, taken = aware(), list[str]()
    for query in (matched(), matched(b=90), matched(), matched()):
        fleet = [replace(candidate(lane), capacity_blocks=1000) for lane in "ab"]
        taken.append(policy.choose(fleet, query).lane)
        policy.given(next(each for each in fleet if each.lane == taken[-1]), query)
    assert taken == ["a", "b", "b", "a"]  # 1600 tokens to a, 160 and 1600 to b


def test_a_worker_that_is_new_gets_no_more_than_its_cache_holds_before_others_have_their_turn() -> None:
    policy, old, new = aware(), replace(candidate("a"), capacity_blocks=200), replace(candidate("b"), capacity_blocks=200)
    for _ in range(10):
        policy.given(old, matched())
    taken = list[str]()
    for _ in range(5):
        taken.append(policy.choose([old, new], matched()).lane)
        policy.given(new if taken[-1] == "b" else old, matched())
    assert taken == ["b", "b", "a", "b", "a"]


def test_the_weight_of_overlap_turns_caches_off_and_that_of_load_turns_queues_off() -> None:
    busy = [candidate("a"), replace(candidate("b"), queued_work_s=0.05)]
    assert aware(overlap_weight=0.0).choose(busy, matched(b=90)).lane == "a"
    assert aware(load_weight=0.0).choose([candidate("a"), replace(candidate("b"), queued_work_s=50.0)], matched(b=90)).lane == "b"


def test_a_temperature_lets_close_seconds_be_taken_too_and_never_the_far() -> None:
    policy = aware(temperature_s=0.01)
    fleet = [candidate("a"), candidate("b"), replace(candidate("c"), queued_work_s=60.0)]
    assert {policy.choose(fleet, matched(a=10, b=9)).lane for _ in range(200)} == {"a", "b"}


def test_the_last_token_is_never_counted_as_cached() -> None:
    assert Query("r", 32, 16, {"a": 2}).cached_tokens("a") == 16
    assert Query("r", 33, 16, {"a": 2}).cached_tokens("a") == 32


def test_a_session_stays_until_another_worker_is_sooner_by_more_than_the_affinity() -> None:
    policy = aware(session_affinity_s=0.1)
    query = replace(matched(), session_lane="b")
    assert policy.choose([candidate("a"), replace(candidate("b"), queued_work_s=0.05)], query).lane == "b"
    assert policy.choose([candidate("a"), replace(candidate("b"), queued_work_s=0.5)], query).lane == "a"


def test_prefill_workers_with_decode_room_in_their_own_domain_are_preferred_by_the_time_of_a_far_pull() -> None:
    near, far = card("p", "prefill", domain="a"), card("q", "prefill", domain="b")
    peers = [near.lane, far.lane]
    cards = {
        each.worker: each
        for each in (near, far, card("d", "decode", domain="a", peers=peers), card("e", "decode", domain="b", peers=peers))
    }
    full = {"e-1": WorkerLoad(worker="e", incarnation="1", room=0)}
    policy = KvAware(knobs=KvAwareKnobs(far_pull_s=0.05))
    found = candidates("m", cards, full, LaneLedger())
    assert [each.is_far for each in found] == [False, True]
    scores = policy.choose(found, QUERY).scores
    assert scores[far.lane] == pytest.approx(scores[near.lane] + 0.05)
    assert not any(each.is_far for each in candidates("m", cards, {}, LaneLedger()))
    without_domains = {name: each.model_copy(update={"domain": ""}) for name, each in cards.items()}
    assert not any(each.is_far for each in candidates("m", without_domains, full, LaneLedger()))
