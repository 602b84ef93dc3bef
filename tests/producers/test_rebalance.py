"""Which waiting jobs are worth moving to an idle worker."""

from jetwake.producers.fleet import Candidate
from jetwake.producers.lane_ledger import Booking
from jetwake.producers.rebalance import Waiting, moves
from jetwake.schemas.requests import InferenceRequest
from jetwake.schemas.tokens import pack_tokens


def worker(lane: str, queued: int = 0, running: int = 0, free_slots: int = 1) -> Candidate:
    return Candidate(lane, lane, "prefill", queued, running, 0, free_slots)


def job(name: str, lane: str, before_s: float, sequence: int = 1) -> Waiting:
    request = InferenceRequest(request_id=name, gateway="g", model="m", prompt_tokens=pack_tokens([1]))
    return Waiting(request, Booking(name, lane, 0.1, sequence), before_s, elsewhere_s=0.1)


BUSY = worker("busy", queued=3, running=1, free_slots=0)


def names(waiting: list[Waiting], choice: list[Candidate]) -> list[str]:
    return [moved.request.request_id for moved in moves(waiting, choice)]


def test_the_one_that_gains_most_goes_to_the_one_that_idles() -> None:
    waiting = [job("a", "busy", 1.0), job("b", "busy", 2.0), job("c", "busy", 1.5)]
    assert names(waiting, [BUSY, worker("idle")]) == ["b"]
    assert names(waiting, [BUSY, worker("idle"), worker("idle-too")]) == ["b", "c"]


def test_nothing_moves_when_nobody_idles() -> None:
    assert names([job("a", "busy", 9.0)], [BUSY, worker("other", running=1)]) == []


def test_a_small_gain_is_not_worth_a_move() -> None:
    assert names([job("a", "busy", 0.3)], [BUSY, worker("idle")]) == []


def test_a_worker_with_a_free_slot_takes_it_itself() -> None:
    assert names([job("a", "other", 9.0)], [worker("other", queued=1), worker("idle")]) == []


def test_a_job_that_is_not_stored_yet_cannot_be_taken_back() -> None:
    assert names([job("a", "busy", 9.0, sequence=0)], [BUSY, worker("idle")]) == []
