"""Cancelled or expired, wherever the request is at that moment: its end is told at once, nothing more is computed, no block stays."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fleet import Fleet, fleet_of
from operations import idle, patient, prompt_of, until, until_held

from jetwake.deploy.nats_server import NatsServer
from jetwake.pipeline.connection import Bus
from jetwake.pipeline.topology import subject_counts
from jetwake.producers.client import Client, Submitted
from jetwake.schemas.errors import DeadlineExceeded, RequestCancelled
from jetwake.schemas.streams import PREFILL

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
