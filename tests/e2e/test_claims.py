"""A handoff that the broker delivers again: who may pull it, and who may let go of its blocks."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
from fleet import Fleet, fleet_of
from operations import PATIENCE_S, all_ready, idle, prompt_of, until

from jetwake.consumers.claims import Claims
from jetwake.deploy.nats_server import NatsServer
from jetwake.pipeline.connection import Bus
from jetwake.pipeline.jetstream import NAK, delivery_facts, is_delivery, pull_subject
from jetwake.pipeline.publish import Publisher
from jetwake.pipeline.raw import RawMessage
from jetwake.pipeline.topology import durables
from jetwake.producers.client import Answer, Submitted
from jetwake.schemas import subjects
from jetwake.schemas.codec import decode
from jetwake.schemas.decode import KvHandoff
from jetwake.schemas.errors import HandoffStale
from jetwake.schemas.prefill import ReleaseKv
from jetwake.schemas.streams import HANDOFF


class Waiting:
    """A handoff that was delivered once, to nobody who did anything with it, and waits to be delivered again."""

    def __init__(self, fleet: Fleet, bus: Bus, submitted: Submitted, handoff: KvHandoff) -> None:
        self.fleet, self.bus, self._submitted, self.handoff = fleet, bus, submitted, handoff

    async def claimed_by(self, lane: str) -> None:
        request = self.handoff.request
        await Publisher(self.bus).store_bytes(subjects.claim(request.request_id, request.attempt), lane.encode(), first_only=True)

    def go_on(self) -> None:
        self.fleet.engines["decode-1"].go_on()

    async def holds(self) -> bool:
        """Whether the prefill worker keeps the blocks of this handoff."""
        return self.handoff.kv.engine_request_id in await self.fleet.engines["prefill-1"].held()

    async def until_freed(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while await self.holds():
                await asyncio.sleep(0.01)

    async def answered(self) -> Answer:
        async with asyncio.timeout(PATIENCE_S):
            answer = await self._submitted.answer()
        assert len(answer.token_ids) == 5
        assert sum(engine.stats().counters.get("blocks_wrong", 0) for engine in self.fleet.engines.values()) == 0
        return answer


@asynccontextmanager
async def delivered_to_nobody(server: NatsServer) -> AsyncGenerator[Waiting]:
    """The decode worker has its hands full: `engine.go_on()` lets it go on, and take this one next."""
    worker = {"stall_limit_s": 300}
    async with fleet_of(server.url, prefill=1, aggregated=1, worker=worker) as (fleet, client), Bus.connect(fleet.broker, "test") as bus:
        fleet.start_worker("decode", "decode-1", worker, slots=1)
        await all_ready(fleet, 3)
        await fleet.stop("aggregated-1")
        fleet.forget("aggregated-1")
        engine = fleet.engines["decode-1"]
        engine.stall()
        filling = await client.submit(prompt_of(1), max_tokens=5, temperature=0.0)
        await until(lambda: engine.stats().running_requests == 1)
        submitted = await client.submit(prompt_of(2), max_tokens=5, temperature=0.0)
        yield Waiting(fleet, bus, submitted, await _delivered(bus))
        assert (await filling.answer()).attempts == 1
        await idle(fleet)


async def _delivered(bus: Bus) -> KvHandoff:
    """Takes the one handoff there is as a decode worker would, and hands it back."""
    [durable] = await durables(bus, HANDOFF.name)
    pull = {"batch": 1, "expires": int(PATIENCE_S * 1e9), "group": "decode", "priority": 0}
    inbox, arrived = bus.new_inbox(), asyncio.Queue[RawMessage]()
    subscription = await bus.subscribe(inbox, arrived.put_nowait)
    await bus.publish_with_reply(pull_subject(HANDOFF.name, durable), json.dumps(pull).encode(), inbox)
    message = await arrived.get()
    await subscription.unsubscribe()
    assert is_delivery(message)
    assert delivery_facts(message.reply).deliveries == 1
    await bus.publish(message.reply, NAK)
    return decode(message.data, KvHandoff)


async def test_a_handoff_that_was_delivered_but_not_claimed_is_pulled(own_server: NatsServer) -> None:
    async with delivered_to_nobody(own_server) as waiting:
        waiting.go_on()
        answer = await waiting.answered()
        assert (answer.attempts, answer.decode_worker) == (1, "decode-1")


async def test_a_handoff_that_a_dead_worker_claimed_is_prefilled_anew_and_its_blocks_freed(own_server: NatsServer) -> None:
    async with delivered_to_nobody(own_server) as waiting:
        await waiting.claimed_by("decode-1-gone")
        waiting.go_on()
        assert (await waiting.answered()).attempts == 2
        await waiting.until_freed()


async def test_a_handoff_that_a_live_worker_claimed_is_prefilled_anew_and_its_blocks_left_to_that_one(own_server: NatsServer) -> None:
    """It may be pulling them: freed now, they could be written for another request in the middle of that."""
    async with delivered_to_nobody(own_server) as waiting:
        handoff = waiting.handoff
        prefill_lane = f"{handoff.prefill_worker}-{handoff.prefill_incarnation}"
        await waiting.claimed_by(prefill_lane)  # some worker that is alive
        waiting.go_on()
        assert (await waiting.answered()).attempts == 2
        assert await waiting.holds()
        order = ReleaseKv(request_id=handoff.request.request_id, engine_request_id=handoff.kv.engine_request_id, reason="let go")
        await Publisher(waiting.bus).send(subjects.release(prefill_lane), order)
        await waiting.until_freed()


async def test_a_handoff_whose_claims_the_broker_may_have_forgotten_is_prefilled_anew(own_server: NatsServer) -> None:
    async with delivered_to_nobody(own_server) as waiting:
        await own_server.restart()
        waiting.go_on()
        assert (await waiting.answered()).attempts == 2
        await waiting.until_freed()


async def test_a_handoff_that_comes_again_to_who_has_it_in_hand_is_not_let_go_of_by_the_second_delivery(own_server: NatsServer) -> None:
    async with delivered_to_nobody(own_server) as waiting:
        claims = Claims(waiting.bus, Publisher(waiting.bus), "decode-9-here", dict)
        async with claims.claimed(waiting.handoff):
            assert not await claims.may_let_go(waiting.handoff)
            with pytest.raises(HandoffStale, match="in hand here"):
                async with claims.claimed(waiting.handoff):
                    pass
        assert await claims.may_let_go(waiting.handoff)
        waiting.go_on()
        assert (await waiting.answered()).attempts == 2
