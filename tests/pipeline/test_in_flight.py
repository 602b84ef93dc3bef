"""Cancels reach what they mean, whenever they were said; letting go ends everything with the error it is given."""

import asyncio

import pytest

from jetwake.pipeline.clock import ServerClock
from jetwake.pipeline.connection import Bus
from jetwake.pipeline.in_flight import InFlight
from jetwake.pipeline.publish import Publisher
from jetwake.schemas import subjects
from jetwake.schemas.errors import DeadlineExceeded, RequestCancelled, RequestSuperseded, WorkerLeaving
from jetwake.schemas.replies import CancelRequest

from .harness import request, until


async def cancel(publisher: Publisher, request_id: str, below_attempt: int = 0) -> None:
    notice = CancelRequest(request_id=request_id, below_attempt=below_attempt)
    await publisher.store(subjects.cancel(request_id), notice, message_id=f"{request_id}:{below_attempt}")


async def held(in_flight: InFlight, request_id: str, **changes: object) -> None:
    async with in_flight.guard(request(request_id).model_copy(update=changes), "decode"):
        await asyncio.Event().wait()


async def test_a_cancel_that_was_said_before_is_known(bus: Bus, publisher: Publisher, unique: str) -> None:
    await cancel(publisher, f"{unique}-a")
    await cancel(publisher, f"{unique}-b", below_attempt=2)
    in_flight = InFlight(bus, ServerClock(bus))
    await in_flight.start()
    with pytest.raises(RequestCancelled):
        in_flight.check(request(f"{unique}-a"), "prefill")
    with pytest.raises(RequestSuperseded):
        in_flight.check(request(f"{unique}-b"), "prefill")
    in_flight.check(request(f"{unique}-b").model_copy(update={"attempt": 2}), "prefill")


async def test_what_runs_ends_when_it_is_cancelled_and_others_go_on(bus: Bus, publisher: Publisher, unique: str) -> None:
    in_flight = InFlight(bus, ServerClock(bus))
    await in_flight.start()
    told: list[str] = []
    in_flight.on_cancel(told.append)
    meant, other = (asyncio.create_task(held(in_flight, f"{unique}-{name}")) for name in "ab")
    await until(lambda: len(in_flight) == 2)
    await cancel(publisher, f"{unique}-a")
    with pytest.raises(RequestCancelled, match="during decode"):
        await meant
    assert told == [f"{unique}-a"]
    assert len(in_flight) == 1
    in_flight.leave(WorkerLeaving("bye"))
    with pytest.raises(WorkerLeaving, match="bye"):
        await other
    with pytest.raises(WorkerLeaving):
        await held(in_flight, f"{unique}-c")
    assert len(in_flight) == 0


async def test_a_deadline_counts_for_more_than_letting_go(bus: Bus, unique: str) -> None:
    clock = ServerClock(bus)
    await clock.sync()
    in_flight = InFlight(bus, clock)
    with pytest.raises(DeadlineExceeded, match="during decode"):
        await held(in_flight, unique, deadline_ns=clock.now_ns() + 50_000_000)
