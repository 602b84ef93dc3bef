"""How many batch requests may start now."""

from typing import Any

import pytest

from jetwake.producers.batch_share import decode_has_room, startable
from jetwake.producers.fleet import Candidate
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


def worker(base_s: float = 0.05, **facts: Any) -> Candidate:
    usual: dict[str, Any] = {"queued_requests": 0, "running_requests": 0, "running_prompt_tokens": 0, "free_slots": 64}
    return Candidate(lane="p-1", worker="p", role="prefill", timing=PrefillTiming(base_s=base_s, per_token_s=0.0001), **{**usual, **facts})


@pytest.mark.parametrize(
    ("candidate", "expected"),
    [
        (worker(), 1),
        (worker(base_s=0.001), 20),
        (worker(base_s=0.001, free_slots=3), 3),
        (worker(base_s=0.001, queued_requests=5), 15),
        (worker(base_s=0.0), 64),
        (worker(free_slots=0), 0),
        (worker(free_slots=1, queued_requests=1), 0),
        (worker(queued_work_s=0.05), 0),
        (worker(prefill_left_s=0.3, told_s=10.0), 0),
        (worker(prefill_left_s=0.3, told_s=9.0), 1),  # told a second ago, and over by now
    ],
)
def test_a_worker_without_prefill_work_starts_what_is_soon_over(candidate: Candidate, expected: int) -> None:
    assert startable([candidate], now_s=10.0) == expected
    assert startable([candidate, candidate], now_s=10.0) == 2 * expected


def test_one_idle_worker_is_left_to_those_who_wait_for_tokens() -> None:
    idle, busy = worker(), worker(queued_work_s=1.0)
    assert startable([idle, idle, busy], 10.0, leave_one=True) == 1
    assert startable([idle, busy], 10.0, leave_one=True) == 0
    assert startable([idle], 10.0, leave_one=True) == 1  # where there is one only, all share it
    assert startable([], 10.0, leave_one=True) == 0


def test_the_last_decode_slots_are_not_for_batch() -> None:
    def card(name: str, role: Any = "decode", state: Any = "ready") -> WorkerCard:
        return WorkerCard(
            worker=name, incarnation="1", role=role, state=state, model="m", pool="m-1", compatibility=SAME,
            capacity_blocks=100, capacity_slots=64, max_model_len_tokens=1000,
        )  # fmt: skip

    def load(name: str, free_slots: int) -> dict[str, WorkerLoad]:
        return {f"{name}-1": WorkerLoad(worker=name, incarnation="1", free_slots=free_slots)}

    cards = {"d": card("d"), "e": card("e"), "p": card("p", "prefill"), "gone": card("gone", state="draining")}
    assert decode_has_room({}, {})
    assert decode_has_room(cards, {})
    assert decode_has_room(cards, load("d", 9))
    assert not decode_has_room(cards, load("d", 8))
    assert decode_has_room(cards, load("d", 8) | load("e", 9))
    assert not decode_has_room(cards, load("d", 8) | load("p", 60) | load("gone", 60))
