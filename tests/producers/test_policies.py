"""Policies and the view of the fleet they decide on."""

import pytest

from jetwake.producers.fleet import Candidate, candidates
from jetwake.producers.policies import POLICIES, Query, make_policy
from jetwake.schemas.errors import SetupError
from jetwake.schemas.workers import KvCompatibility, WorkerCard, WorkerLoad

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
    assert [found.lane for found in candidates("m", cards, {}, {})] == [prefill.lane]
    assert candidates("m", {"p": prefill}, {}, {}) == ()


def test_draining_workers_and_other_models_are_no_candidates() -> None:
    cards = {
        "a": card("a", "aggregated"),
        "b": card("b", "aggregated", state="draining"),
        "c": card("c", "aggregated", model="other"),
    }
    assert [found.worker for found in candidates("m", cards, {}, {})] == ["a"]


def test_queued_is_what_was_routed_and_not_yet_fetched() -> None:
    cards = {"a": card("a", "aggregated")}
    load = WorkerLoad(worker="a", incarnation="1", fetched_requests=3, running_requests=2)
    [found] = candidates("m", cards, {"a-1": load}, {"a-1": 5})
    assert (found.queued_requests, found.running_requests, found.load) == (2, 2, 4)
