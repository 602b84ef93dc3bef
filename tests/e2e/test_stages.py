"""Where the time of requests went, on a live system: the stages add up to what the client's own clock says."""

import asyncio
import time

from fleet import fleet_of

from jetwake.consumers.timing import DYNAMO_DEFAULT as SLOW
from jetwake.deploy.nats_server import NatsServer
from jetwake.pipeline.clock import WallClock
from jetwake.pipeline.connection import Bus
from jetwake.pipeline.endings import Endings
from jetwake.pipeline.publish import Publisher
from jetwake.pipeline.terminals import Terminals
from jetwake.producers.client import Answer, Client
from jetwake.schemas.errors import NoWorker
from jetwake.schemas.timeline import TTFT_STAGES

ONE_ENGINE = ["accept", "queue", "routing", "prefill_queue", "prefill", "generation", "delivery", "end_delivery"]
BOTH_LEGS = [*ONE_ENGINE[:5], "handoff_wait", "transfer", "first_step", *ONE_ENGINE[5:]]
WITHIN = 0.05


async def timed(client: Client, number: int, max_tokens: int) -> tuple[float, float, Answer]:
    """The answer, with seconds to its first piece and to its end by a clock of our own."""
    began = time.perf_counter()
    first_s = 0.0
    submitted = await client.submit([number, *range(600)], max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    async for _ in submitted:
        first_s = first_s or time.perf_counter() - began
    return first_s, time.perf_counter() - began, await submitted.answer()


def adds_up(first_s: float, total_s: float, answer: Answer) -> bool:
    spent = answer.stages_s
    ttft_s = sum(spent.get(stage, 0.0) for stage in (*TTFT_STAGES, "delivery"))
    whole_s = sum(length for stage, length in spent.items() if stage != "delivery")
    return abs(ttft_s - first_s) <= WITHIN * first_s and abs(whole_s - total_s) <= WITHIN * total_s


async def test_stages_add_up_to_what_the_client_waits(nats_server: NatsServer, unique: str) -> None:
    """Six at once for one prefill slot, so that queues have their part."""
    async with fleet_of(nats_server.url, prefill=1, decode=1, model=unique, slots=2, timing=SLOW) as (_, client):
        found = [await timed(client, 0, 1), *await asyncio.gather(*(timed(client, number, 12) for number in range(1, 7)))]
    single, *whole = found
    assert list(single[2].stages_s) == ONE_ENGINE
    assert [list(answer.stages_s) for _, _, answer in whole] == [BOTH_LEGS] * 6
    assert max(answer.stages_s["queue"] + answer.stages_s["prefill_queue"] for _, _, answer in whole) > 0.02, "nothing waited"
    assert all(adds_up(*each) for each in found), [(first_s, total_s, answer.stages_s) for first_s, total_s, answer in found]


async def test_stages_of_one_engine_and_of_a_request_that_began_anew(nats_server: NatsServer, unique: str) -> None:
    async with (
        fleet_of(nats_server.url, aggregated=1, model=unique, timing=SLOW) as (fleet, client),
        Bus.connect(fleet.broker, "mover") as bus,
    ):
        found = await timed(client, 0, 30)
        assert list(found[2].stages_s) == ONE_ENGINE
        assert adds_up(*found), found

        publisher = Publisher(bus)
        endings = Endings(publisher, Terminals(bus, publisher, WallClock()))
        began = time.perf_counter()
        submitted = await client.submit([1, *range(600)], max_tokens=60, temperature=0.0, ignore_eos=True)
        first_s = 0.0
        async for _ in submitted:
            if not first_s:
                first_s = time.perf_counter() - began
                told = submitted.request.stamped(first_token_ns=client.now_ns())
                await endings.again(told, NoWorker("moved by a test"), is_fault=False)
        answer = await submitted.answer()
        total_s = time.perf_counter() - began
    spent = answer.stages_s
    assert answer.attempts == 2
    assert list(spent)[:3] == ["accept", "earlier_attempts", "queue"]
    assert spent["earlier_attempts"] >= first_s * (1 - WITHIN) - spent["accept"]
    assert abs(sum(length for stage, length in spent.items() if stage != "delivery") - total_s) <= WITHIN * total_s
