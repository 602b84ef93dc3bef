# nats-py is partly untyped, and this module is to use nothing else:
# pyright: reportUnknownMemberType=false
"""The floor under every latency of the pipe: the same hops made with nothing but nats-py. Used by `jetwake bench overhead`.

One pass: a body travels through three work-queue streams (publish with ack, fetch, next publish, ack) and one plain message.
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import nats
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import RetentionPolicy, StorageType, StreamConfig

DURABLE_HOPS = 3
_PREFIX = "jwfloor"


async def measure_floor(url: str, passes: int, body_bytes: int) -> list[float]:
    """Seconds for each of `passes` sequential passes."""
    client = await nats.connect(url)
    try:
        async with _relay(client) as arrived:
            body, times_s = b"x" * body_bytes, list[float]()
            jetstream = client.jetstream()
            for _ in range(passes):
                arrived.clear()
                started_s = time.perf_counter()
                await jetstream.publish(f"{_PREFIX}.0", body)
                await arrived.wait()
                times_s.append(time.perf_counter() - started_s)
            return times_s
    finally:
        await client.close()


@asynccontextmanager
async def _relay(client: Client) -> AsyncGenerator[asyncio.Event]:
    """The streams and the tasks that pass messages on. The event is set when a body has come through."""
    jetstream, arrived = client.jetstream(), asyncio.Event()

    async def on_arrival(_: object) -> None:
        arrived.set()

    await client.subscribe(f"{_PREFIX}.done", cb=on_arrival)
    for hop in range(DURABLE_HOPS):
        config = StreamConfig(name=f"{_PREFIX}{hop}", subjects=[f"{_PREFIX}.{hop}"])
        config.retention, config.storage = RetentionPolicy.WORK_QUEUE, StorageType.FILE
        await jetstream.add_stream(config)
    tasks = [asyncio.create_task(_pass_on(client, jetstream, hop)) for hop in range(DURABLE_HOPS)]
    try:
        yield arrived
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for hop in range(DURABLE_HOPS):
            await jetstream.delete_stream(f"{_PREFIX}{hop}")


async def _pass_on(client: Client, jetstream: JetStreamContext, hop: int) -> None:
    subscription = await jetstream.pull_subscribe(f"{_PREFIX}.{hop}", durable=f"{_PREFIX}{hop}")
    while True:
        for message in await subscription.fetch(1, timeout=3600):
            if hop + 1 < DURABLE_HOPS:
                await jetstream.publish(f"{_PREFIX}.{hop + 1}", message.data)
            else:
                await client.publish(f"{_PREFIX}.done", message.data)
            await message.ack()
