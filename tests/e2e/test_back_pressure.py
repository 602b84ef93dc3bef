"""A pipe that is full from end to end: nothing grows over its bound, new work is refused with a time, what was accepted ends."""

import asyncio
from collections import Counter

import pytest
from fleet import fleet_of
from operations import idle, patient, prompt_of

from jetwake.consumers import leases
from jetwake.deploy.nats_server import NatsServer
from jetwake.pipeline.connection import Bus
from jetwake.pipeline.settings import TopologySettings
from jetwake.pipeline.topology import stream_counts
from jetwake.producers.client import Client, Submitted
from jetwake.producers.overload import LONGEST_S, SHORTEST_S, QueueLook, retry_after_s
from jetwake.schemas.errors import Overloaded

LIMITS = TopologySettings(max_requests=20, max_jobs_per_worker=4)


async def test_a_full_pipe_refuses_and_then_flows(own_server: NatsServer) -> None:
    """Decode stands still. Blocks of the prefill worker, its queue, and the request stream fill up, in this order."""
    options = {"num_blocks": 64, "slots": 4}
    worker = {"stall_limit_s": 300, "held_blocks_share": 0.5}
    async with fleet_of(own_server.url, prefill=1, decode=1, worker=worker, limits=LIMITS, **options) as (fleet, client):
        fleet.engines["decode-1"].stall()
        accepted: list[Submitted] = []
        refusals, waits_s = 0, list[float]()
        async with asyncio.timeout(60), Bus.connect(patient(fleet.broker), "looker") as bus:
            while refusals < 20:  # a refusal may be of a moment in which the router is busy: so many in a row are not
                try:
                    accepted.append(await client.submit(prompt_of(len(accepted)), max_tokens=3, temperature=0.0))
                    refusals = 0
                except Overloaded as error:
                    refusals += 1
                    waits_s.append(error.retry_after_s)
                    await asyncio.sleep(0.02)
                counts = await stream_counts(bus)
                assert counts["JW_REQUESTS"].messages <= LIMITS.max_requests
                assert counts["JW_PREFILL"].messages <= LIMITS.max_jobs_per_worker
                held = await fleet.engines["prefill-1"].held()
                assert sum(each.blocks for each in held.values()) <= 64 * 0.5 + 4 * 4  # what was in hand when the share was reached
            assert all(SHORTEST_S <= wait_s <= LONGEST_S for wait_s in waits_s)
            assert counts["JW_REQUESTS"].messages == LIMITS.max_requests
            assert counts["JW_PREFILL"].messages == LIMITS.max_jobs_per_worker
        fleet.engines["decode-1"].go_on()
        async with asyncio.timeout(60):
            answers = [await submitted.answer() for submitted in accepted]
        assert Counter(len(answer.token_ids) for answer in answers) == {3: len(accepted)}
        assert len(accepted) > LIMITS.max_requests + LIMITS.max_jobs_per_worker
        await idle(fleet)


async def test_blocks_that_were_pulled_are_room_although_the_next_look_is_far(
    own_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty prompts of six blocks one after the other, where no more than thirty-two blocks may wait to be pulled."""
    monkeypatch.setattr(leases, "POLL_S", 3600.0)
    async with fleet_of(own_server.url, prefill=1, decode=1, worker={"held_blocks_share": 0.5}, num_blocks=64) as (fleet, client):
        async with asyncio.timeout(60):
            for number in range(20):
                answer = await client.generate([number, *range(95)], max_tokens=3, temperature=0.0, ignore_eos=True)
                assert len(answer.token_ids) == 3
        await idle(fleet)


async def is_accepted(client: Client, accepted: list[Submitted]) -> bool:
    try:
        accepted.append(await client.submit(prompt_of(len(accepted)), max_tokens=3))
    except Overloaded:
        return False
    return True


async def test_an_aggregated_worker_refuses_the_same_way(own_server: NatsServer) -> None:
    async with fleet_of(own_server.url, aggregated=1, worker={"stall_limit_s": 300}, limits=LIMITS, slots=2) as (fleet, client):
        fleet.engines["aggregated-1"].stall()
        accepted: list[Submitted] = []
        async with asyncio.timeout(60):
            while await is_accepted(client, accepted):
                pass
        fleet.engines["aggregated-1"].go_on()
        assert len(accepted) >= LIMITS.max_requests
        for submitted in accepted:
            await submitted.answer()
        await idle(fleet)


@pytest.mark.parametrize(
    ("waiting", "taken", "wait_s"),
    [(1000, 50, 2.0), (1000, 1, LONGEST_S), (1000, 0, LONGEST_S), (10, 1000, SHORTEST_S), (0, 0, SHORTEST_S)],
)
def test_how_long_to_wait_follows_the_queue_and_its_pace(waiting: int, taken: int, wait_s: float) -> None:
    assert retry_after_s(QueueLook(10.0, waiting, 0), QueueLook(11.0, waiting, taken)) == wait_s
