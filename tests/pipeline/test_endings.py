"""Another attempt: what counts against a request, who is told, and when it is enough."""

import pytest

from jetwake.pipeline.clock import WallClock
from jetwake.pipeline.connection import Bus, RawMessage
from jetwake.pipeline.dead_letters import Kept, again_from, dead_letters
from jetwake.pipeline.endings import Endings
from jetwake.pipeline.publish import Publisher
from jetwake.pipeline.replies import ReplyInbox
from jetwake.pipeline.terminals import Terminals
from jetwake.schemas import subjects
from jetwake.schemas.codec import decode
from jetwake.schemas.errors import EngineDead, HandoffStale, InvalidRequest, JetwakeError, PullFailed, WorkerLeaving
from jetwake.schemas.replies import CancelRequest, DeadLetter
from jetwake.schemas.requests import InferenceRequest

from .harness import request, until


class Listener:
    """Hears what `Endings` sends about one request."""

    def __init__(self, bus: Bus, unique: str) -> None:
        self.bus = bus
        self.endings = Endings(Publisher(bus), Terminals(bus, Publisher(bus), WallClock()))
        self.request = request(unique, gateway=unique, model=unique)
        self.again: list[InferenceRequest] = []
        self.notices: list[CancelRequest] = []

    async def listen(self) -> None:
        await self.bus.subscribe(subjects.requests_again("interactive"), self._on_request)
        await self.bus.subscribe(subjects.cancel(self.request.request_id), self._on_notice)
        await self.bus.flush()

    async def after(self, *steps: tuple[JetwakeError, str]) -> InferenceRequest | None:
        """Each step is an attempt that ended with this error at this worker. The request as it goes on, or None."""
        for error, worker in steps:
            count = len(self.again)
            await self.endings.again(self.again[-1] if self.again else self.request, error, worker=worker)
            await self.bus.flush()
            if len(self.again) == count:
                return None
        return self.again[-1]

    def _on_request(self, message: RawMessage) -> None:
        request = decode(message.data, InferenceRequest)
        if request.request_id == self.request.request_id:
            self.again.append(request)

    def _on_notice(self, message: RawMessage) -> None:
        self.notices.append(decode(message.data, CancelRequest))


@pytest.fixture
async def listener(bus: Bus, unique: str) -> Listener:
    listener = Listener(bus, unique)
    await listener.listen()
    return listener


async def test_faults_are_counted_with_their_workers_and_fenced(listener: Listener) -> None:
    following = await listener.after((EngineDead("x"), "w1"), (PullFailed("x"), "w2"))
    assert following is not None
    assert (following.attempt, following.failures, following.failed_workers) == (3, 2, ["w1", "w2"])
    await until(lambda: len(listener.notices) == 2)
    assert [notice.below_attempt for notice in listener.notices] == [2, 3]


async def test_being_moved_is_no_fault_however_often(listener: Listener) -> None:
    following = await listener.after(*[(WorkerLeaving("x"), "w1"), (HandoffStale("x"), "w2")] * 5)
    assert following is not None
    assert (following.attempt, following.failures, following.failed_workers) == (11, 0, [])


async def test_the_third_fault_is_the_end(listener: Listener, bus: Bus, unique: str) -> None:
    assert await listener.after(*[(EngineDead("x"), f"w{number}") for number in range(3)]) is None
    end = await ReplyInbox(bus, unique, WallClock()).lookup(unique, unique, unique)
    assert end is not None
    assert end.type == "failed"
    [kept] = [kept for kept in await dead_letters(bus) if kept.letter.request_id == unique]
    assert kept.request is not None
    assert (kept.letter.worker, kept.request.failed_workers) == ("w2", ["w0", "w1", "w2"])


def test_a_request_that_is_sent_again_begins_anew_under_another_id() -> None:
    old = request("r1").model_copy(
        update={"attempt": 3, "failures": 3, "failed_workers": ["a"], "submitted_ns": 10**9, "deadline_ns": 3 * 10**9}
    )
    letter = DeadLetter(stage="attempts", subject="s", code="c", text="t", payload=b"")
    again = again_from(Kept(7, letter, old), now_ns=10**12)
    assert (again.request_id, again.attempt, again.failures, again.failed_workers) == ("r1-r7", 1, 0, [])
    assert again.deadline_ns == 10**12 + 2 * 10**9
    assert again_from(Kept(9, letter, again), now_ns=1, gateway="me").request_id == "r1-r9"
    assert again_from(Kept(9, letter, again), now_ns=1, gateway="me").gateway == "me"
    with pytest.raises(InvalidRequest, match="holds no request"):
        again_from(Kept(7, letter, None), now_ns=1)
