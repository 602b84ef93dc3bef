"""Which decode worker gets a handoff: the least used one first, of the prefill worker's topology domain as long as one there has room."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from fleet import Fleet, fleet_of
from operations import PATIENCE_S, all_ready, idle, patient, prompt_of, until

from jetwake.deploy.nats_server import NatsServer
from jetwake.pipeline.connection import Bus
from jetwake.pipeline.jetstream import api
from jetwake.pipeline.topology import delete_consumer, durables
from jetwake.producers.client import Client, Submitted
from jetwake.schemas.streams import HANDOFF

SLOTS = 16
OFFERED = 14
"""Of 16 slots, 2 are for prompts without a handoff."""
STAYS = {"stall_limit_s": 300}


def running(fleet: Fleet, name: str) -> int:
    return fleet.engines[name].stats().running_requests


async def until_pulls(bus: Bus, least: int) -> None:
    """So many pulls wait at the broker, over all queues of handoffs."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            infos = [await api(bus, f"CONSUMER.INFO.{HANDOFF.name}.{name}") for name in await durables(bus, HANDOFF.name)]
            if sum(info["num_waiting"] for info in infos) >= least:
                return
            await asyncio.sleep(0.01)


@asynccontextmanager
async def looker(fleet: Fleet) -> AsyncGenerator[Bus]:
    async with Bus.connect(patient(fleet.broker), "looker") as bus:
        yield bus


class Filling:
    """Requests that stay where they are, as the decode engines stand still."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._sent: list[Submitted] = []

    async def send(self, count: int) -> None:
        for _ in range(count):
            self._sent.append(await self._client.submit(prompt_of(len(self._sent)), max_tokens=3, temperature=0.0))

    async def all_answered(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            answers = [await each.answer() for each in self._sent]
        assert [(len(answer.token_ids), answer.attempts) for answer in answers] == [(3, 1)] * len(self._sent)


async def test_the_least_used_decode_worker_is_served_first(own_server: NatsServer) -> None:
    """One worker has five requests when another comes: a burst of three goes to that one alone, and so do what follows until they are even."""
    async with fleet_of(own_server.url, prefill=1, decode=1, worker=STAYS, slots=SLOTS) as (fleet, client), looker(fleet) as bus:
        filling = Filling(client)
        fleet.engines["decode-1"].stall()
        await filling.send(5)
        await until(lambda: running(fleet, "decode-1") == 5)
        fleet.start_worker("decode", "decode-2", STAYS, slots=SLOTS)
        await all_ready(fleet, 3)
        fleet.engines["decode-2"].stall()
        await until_pulls(bus, 6)  # those of the first at two priorities, of the second at five
        await filling.send(3)
        await until(lambda: running(fleet, "decode-1") + running(fleet, "decode-2") == 8)
        assert running(fleet, "decode-2") == 3
        for engine in fleet.engines.values():
            engine.go_on()
        await filling.all_answered()
        await idle(fleet)


async def test_near_decode_workers_are_served_first_and_far_ones_when_no_near_one_has_room(own_server: NatsServer) -> None:
    """The far worker is idle all the time; it gets nothing until the near one is full."""
    async with fleet_of(own_server.url, prefill=1, decode=1, worker={**STAYS, "domain": "rack a"}, slots=SLOTS) as (fleet, client):
        fleet.start_worker("decode", "far", {**STAYS, "domain": "rack b"}, slots=SLOTS)
        await all_ready(fleet, 3)
        async with looker(fleet) as bus:
            await until_pulls(bus, 10)
        filling = Filling(client)
        for engine in (fleet.engines["decode-1"], fleet.engines["far"]):
            engine.stall()
        for count in range(1, OFFERED):
            await filling.send(1)
            await until(lambda count=count: running(fleet, "decode-1") + running(fleet, "far") == count)
        assert running(fleet, "far") == 0
        await filling.send(4)
        await until(lambda: running(fleet, "far") >= 3)
        await until(lambda: running(fleet, "decode-1") + running(fleet, "far") == OFFERED + 3)
        for engine in fleet.engines.values():
            engine.go_on()
        await filling.all_answered()
        await idle(fleet)


async def test_handoffs_of_a_domain_without_decode_workers_are_taken_over_a_restart_and_without_their_consumer(
    own_server: NatsServer,
) -> None:
    """The only decode worker is in another domain; the broker restarts, and then the queue's durable is deleted."""
    async with fleet_of(own_server.url, decode=1, prefill=0, aggregated=1, slots=SLOTS, worker={"domain": "b"}) as (fleet, client):
        fleet.start_worker("prefill", "prefill-1", {"domain": "a"}, slots=SLOTS)
        await all_ready(fleet, 3)
        await fleet.stop("aggregated-1")
        fleet.forget("aggregated-1")
        filling = Filling(client)
        await filling.send(20)
        await filling.all_answered()
        await own_server.restart()
        await filling.send(20)
        await filling.all_answered()
        async with looker(fleet) as bus:
            names = await durables(bus, HANDOFF.name)
            assert sorted(name.rpartition("=")[2] for name in names) == ["a", "b"]
            for name in names:
                assert await delete_consumer(bus, HANDOFF.name, name)
        await filling.send(20)
        await filling.all_answered()
        await idle(fleet)


async def test_what_a_domain_left_behind_is_taken_and_its_durable_goes(own_server: NatsServer) -> None:
    """The last prefill worker of a domain dies with handoffs in the queue: they are prefilled again elsewhere."""
    async with fleet_of(own_server.url, prefill=1, decode=1, slots=SLOTS, worker=STAYS) as (fleet, client), looker(fleet) as bus:
        before = await durables(bus, HANDOFF.name)
        fleet.start_worker("prefill", "gone", {**STAYS, "domain": "a"}, slots=SLOTS)
        await all_ready(fleet, 3)
        fleet.engines["decode-1"].stall()
        sent = [await client.submit(prompt_of(number), max_tokens=3, temperature=0.0) for number in range(2 * OFFERED)]
        async with asyncio.timeout(PATIENCE_S):
            while (await fleet.engines["gone"].held()) == {} or len(await fleet.engines["prefill-1"].held()) == 0:
                await asyncio.sleep(0.01)
        await fleet.kill("gone")
        fleet.engines["decode-1"].go_on()
        async with asyncio.timeout(PATIENCE_S):
            answers = [await each.answer() for each in sent]
            assert all(len(answer.token_ids) == 3 for answer in answers)
            while await durables(bus, HANDOFF.name) != before:
                await asyncio.sleep(0.05)
        await fleet.kill_all()
