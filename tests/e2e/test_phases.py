"""Cancelled or expired, wherever the request is at that moment: its end is told at once, nothing more is computed, no block stays."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fleet import Fleet, fleet_of
from operations import idle, patient, prompt_of, until, until_held
from test_dead_workers import worker_process

from jetwake.deploy.chaos.freezing import freeze, thaw
from jetwake.deploy.nats_server import NatsServer
from jetwake.pipeline.connection import Bus, RawMessage
from jetwake.pipeline.jetstream import bucket_stream, key_subject, last_message
from jetwake.pipeline.publish import Publisher
from jetwake.pipeline.topology import subject_counts
from jetwake.producers.client import Client, Submitted
from jetwake.schemas import subjects
from jetwake.schemas.codec import decode
from jetwake.schemas.errors import DeadlineExceeded, RequestCancelled
from jetwake.schemas.streams import HANDOFF, PREFILL, WORKERS_BUCKET
from jetwake.schemas.workers import WorkerLoad

OPTIONS: dict[str, Any] = {"worker": {"stall_limit_s": 300}, "slots": 1}


async def in_routing(fleet: Fleet, client: Client, timeout_s: float) -> Submitted:
    """No worker is there."""
    await fleet.stop("prefill-1")
    fleet.forget("prefill-1")
    return await client.submit(prompt_of(1), max_tokens=5, timeout_s=timeout_s)


async def in_the_queue(fleet: Fleet, client: Client, timeout_s: float) -> Submitted:
    """Behind another one that never ends."""
    fleet.engines["prefill-1"].stall()
    await client.submit(prompt_of(1), max_tokens=5, timeout_s=1.0)
    await until(lambda: fleet.engines["prefill-1"].stats().running_requests == 1)
    submitted = await client.submit(prompt_of(2), max_tokens=5, timeout_s=timeout_s)
    async with asyncio.timeout(20), Bus.connect(patient(fleet.broker), "looker") as bus:
        while sum((await subject_counts(bus, PREFILL.name)).values()) < 2:
            await asyncio.sleep(0.01)
    return submitted


async def in_prefill(fleet: Fleet, client: Client, timeout_s: float) -> Submitted:
    fleet.engines["prefill-1"].stall()
    submitted = await client.submit(prompt_of(1), max_tokens=5, timeout_s=timeout_s)
    await until(lambda: fleet.engines["prefill-1"].stats().running_requests == 1)
    return submitted


async def in_handoff(fleet: Fleet, client: Client, timeout_s: float) -> Submitted:
    """Behind others that hold all decode slots."""
    fleet.engines["decode-1"].stall()
    for number in range(3):
        await client.submit(prompt_of(number), max_tokens=5, timeout_s=1.0)
    submitted = await client.submit(prompt_of(9), max_tokens=5, timeout_s=timeout_s)
    await until_held(fleet, "prefill-1", 2)
    return submitted


async def in_decode(fleet: Fleet, client: Client, timeout_s: float) -> Submitted:
    submitted = await client.submit(prompt_of(1), max_tokens=5, timeout_s=timeout_s)
    fleet.engines["decode-1"].stall()
    await until(lambda: fleet.engines["decode-1"].stats().running_requests == 1)
    return submitted


Phase = Callable[[Fleet, Client, float], Awaitable[Submitted]]
PHASES: list[Phase] = [in_routing, in_the_queue, in_prefill, in_handoff, in_decode]


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.__name__)
@pytest.mark.parametrize("how", ["cancelled", "expired"])
async def test_in_every_phase(own_server: NatsServer, phase: Phase, how: str) -> None:
    async with fleet_of(own_server.url, prefill=1, decode=1, **OPTIONS) as (fleet, client):
        submitted = await phase(fleet, client, 300.0 if how == "cancelled" else 1.5)
        drawn = fleet.engines["decode-1"].stats().counters["drawn_tokens"]
        async with asyncio.timeout(20):
            if how == "cancelled":
                await submitted.cancel()
                with pytest.raises(RequestCancelled):
                    await submitted.answer()
            else:
                with pytest.raises(DeadlineExceeded, match=r"deadline passed (before|during|while)"):
                    await submitted.answer()
        for engine in fleet.engines.values():
            engine.go_on()
        await idle(fleet)
        assert fleet.engines["decode-1"].stats().counters["drawn_tokens"] - drawn <= 64


@asynccontextmanager
async def loads_of(fleet: Fleet) -> AsyncGenerator[dict[str, WorkerLoad]]:
    """What each worker last said of itself."""
    loads: dict[str, WorkerLoad] = {}

    def on_load(raw: RawMessage) -> None:
        load = decode(raw.data, WorkerLoad)
        loads[load.worker] = load

    async with Bus.connect(patient(fleet.broker), "looker") as bus:
        await bus.subscribe(subjects.LOADS, on_load)
        yield loads


async def stays_known(fleet: Fleet, stopped: str) -> None:
    """Its card outlives its renewals: what is tested here should not end because a stopped worker is taken for dead."""
    async with Bus.connect(patient(fleet.broker), "keeper") as bus:
        card = await last_message(bus, bucket_stream(WORKERS_BUCKET.name), key_subject(WORKERS_BUCKET.name, stopped))
        assert card is not None
        await Publisher(bus).store_bytes(key_subject(WORKERS_BUCKET.name, stopped), card.data, ttl_s=60)


async def test_in_the_middle_of_the_pull(own_server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prefill worker is stopped while its blocks are read over TCP. The request ends all the same; its blocks are free on both
    sides when nothing can read or write them any more, and not before."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    options = ("timing=dynamo-default", "slots=1")
    blocks = 20
    async with (
        worker_process(own_server.url, "prefill", "prefill-x", "sim", tmp_path / "prefill", *options) as prefill,
        worker_process(own_server.url, "decode", "decode-x", "sim", tmp_path / "decode", *options),
        fleet_of(own_server.url) as (fleet, client),
        loads_of(fleet) as loads,
    ):
        await until(lambda: {"prefill-x", "decode-x"} <= set(loads))
        for number, how in enumerate(["cancelled", "expired"]):
            in_the_way = await client.submit(prompt_of(2 * number), max_tokens=20_000)
            await anext(aiter(in_the_way))
            await until(lambda: loads["decode-x"].used_blocks > 0)
            submitted = await client.submit(
                prompt_of(2 * number + 1, blocks * 16), max_tokens=5, timeout_s=300.0 if how == "cancelled" else 3.5
            )
            await until(lambda: loads["prefill-x"].held_blocks == blocks)
            await freeze(prefill.pid)
            await stays_known(fleet, "prefill-x")
            await in_the_way.cancel()
            await until(lambda: loads["decode-x"].used_blocks == blocks)  # the one slot is free: it pulls
            async with asyncio.timeout(20):
                if how == "cancelled":
                    await submitted.cancel()
                with pytest.raises(RequestCancelled if how == "cancelled" else DeadlineExceeded, match=r"during decode|cancelled"):
                    await submitted.answer()
            await until(lambda: loads["decode-x"].running_requests == 0)
            assert loads["decode-x"].used_blocks == blocks
            thaw(prefill.pid)
            await until(lambda: loads["decode-x"].used_blocks == loads["prefill-x"].used_blocks == loads["prefill-x"].held_blocks == 0)
            async with asyncio.timeout(20), Bus.connect(patient(fleet.broker), "looker") as bus:
                while await subject_counts(bus, HANDOFF.name):
                    await asyncio.sleep(0.05)
        assert (await client.generate(prompt_of(9), max_tokens=5)).finish_reason == "length"
