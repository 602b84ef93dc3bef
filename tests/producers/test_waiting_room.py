"""Who waits in the router goes when `holding` says so, by what the router itself has measured."""

import asyncio
import time

from jetwake.producers.delivery_time import DeliveryTime
from jetwake.producers.fleet import Candidate
from jetwake.producers.lane_ledger import Booking, LaneLedger
from jetwake.producers.policies import Decision, KvAware, KvAwareKnobs, Query
from jetwake.producers.prefix_index import PrefixIndex
from jetwake.producers.waiting_room import Case, WaitingRoom
from jetwake.schemas.requests import InferenceRequest
from jetwake.schemas.tokens import pack_tokens
from jetwake.schemas.workers import PrefillTiming

AN_HOUR_S = 3600.0
PATIENCE_S = 20.0


def case(name: str) -> Case:
    request = InferenceRequest(request_id=name, gateway="g", model="m", prompt_tokens=pack_tokens(range(500)))
    return Case(request, [], Query(name, 500, 16), (), time.monotonic())


async def test_a_job_is_sent_when_its_worker_will_be_free_as_it_gets_there() -> None:
    """The worker is busy for the better part of an hour; only a way of an hour is a reason to send anything."""
    busy = Candidate(
        "x", "x", "prefill", 0, 3, 0, 64,
        prefill_left_s=0.9 * AN_HOUR_S, told_s=time.monotonic(), running_prefills=3, timing=PrefillTiming(base_s=0.02, per_token_s=0.001),
    )  # fmt: skip
    ledger, delivery = LaneLedger(), DeliveryTime()

    def book(case: Case, decision: Decision) -> Booking:
        return ledger.book(case.request.request_id, decision.lane, 0.5, time.monotonic())

    policy = KvAware(knobs=KvAwareKnobs(hold_s=AN_HOUR_S))
    room = WaitingRoom(policy, PrefixIndex(100), lambda model: (busy,), book, ledger.withdraw, delivery)
    turn = asyncio.create_task(room.turn(case("r")))
    async with asyncio.timeout(PATIENCE_S):
        while not room.kept:
            await asyncio.sleep(0)
        assert not turn.done()
        delivery.seconds = AN_HOUR_S
        room.look()
        assert (await turn).decision.lane == "x"
    assert ledger.queued_requests("x") == 1
