"""Queues of which nothing is delivered though there is room."""

import pytest

from jetwake.pipeline.topology import QueueCount
from jetwake.producers.standing_queues import standing_queues
from jetwake.schemas.workers import WorkerLoad

from .test_policies import card

CARDS = {each.worker: each for each in (card("d", "decode"), card("p", "prefill"), card("q", "prefill", state="draining"))}
HANDOFFS, JOBS = "jw.handoff.p._", "jw.prefill.p-1"
WAITING = QueueCount(3, 1024, delivered=50)


def loads(room: int) -> dict[str, WorkerLoad]:
    return {each.lane: WorkerLoad(worker=each.worker, incarnation="1", room=room) for each in CARDS.values()}


def test_what_waits_while_somebody_has_room_and_nothing_moves_stands() -> None:
    counts = {HANDOFFS: WAITING, JOBS: WAITING, "jw.prefill.q-1": WAITING, "jw.requests.*.batch": WAITING}
    found = standing_queues(counts, counts, CARDS, loads(room=2))
    assert found.keys() == {HANDOFFS, JOBS}
    assert found[HANDOFFS] == "3 wait and none is delivered, though d has room"


@pytest.mark.parametrize(
    ("before", "now", "room"),
    [
        (WAITING, QueueCount(3, 1024, delivered=51), 2),
        (WAITING, WAITING, 0),
        (QueueCount(0, 0, delivered=50), WAITING, 2),
        (WAITING, QueueCount(0, 0, delivered=50), 2),
    ],
    ids=["it moves", "nobody has room", "it has just come", "nothing waits"],
)
def test_what_moves_or_has_to_wait_does_not(before: QueueCount, now: QueueCount, room: int) -> None:
    assert standing_queues({HANDOFFS: before}, {HANDOFFS: now}, CARDS, loads(room)) == {}
