"""Several routers and several attempts of one request: nobody takes away a job that is another's to do."""

import asyncio

from fleet import fleet_of

from jetwake.consumers.timing import DYNAMO_DEFAULT as SLOW
from jetwake.deploy.nats_server import NatsServer
from jetwake.pipeline.clock import WallClock
from jetwake.pipeline.connection import Bus
from jetwake.pipeline.endings import Endings
from jetwake.pipeline.publish import Publisher
from jetwake.pipeline.terminals import Terminals
from jetwake.schemas.errors import NoWorker


async def test_a_request_that_moves_on_while_it_waits_is_done_whichever_router_sent_which_attempt(own_server: NatsServer) -> None:
    """Each router knows only its own decisions: what it remembers of a request may be an attempt that another one went beyond."""
    async with (
        fleet_of(own_server.url, aggregated=1, slots=1, timing=SLOW, policy="kv_aware") as (fleet, client),
        Bus.connect(fleet.broker, "mover") as bus,
    ):
        fleet.start_router("router-2", policy="kv_aware")
        publisher = Publisher(bus)
        endings = Endings(publisher, Terminals(bus, publisher, WallClock()))
        submitted = [await client.submit([number, *range(300)], max_tokens=10, temperature=0.0) for number in range(40)]
        for each in submitted:
            await endings.again(each.request, NoWorker("moved by a test"), is_fault=False)
        async with asyncio.timeout(60):
            answers = [await each.answer() for each in submitted]
        assert all(len(answer.token_ids) == 10 for answer in answers)
