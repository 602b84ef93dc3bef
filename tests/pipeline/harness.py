"""A consumer under test: its queue on a real server, what its handler saw, and how the messages came out."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from jetwake.pipeline.connection import Bus
from jetwake.pipeline.consume import Consumer, Delivery
from jetwake.pipeline.publish import Publisher
from jetwake.schemas import subjects
from jetwake.schemas.errors import JetwakeError
from jetwake.schemas.prefill import PrefillJob
from jetwake.schemas.requests import InferenceRequest
from jetwake.schemas.streams import ConsumerSpec, prefill_consumer
from jetwake.schemas.tokens import pack_tokens

PATIENCE_S = 20.0


def request(request_id: str = "r1", gateway: str = "gw", model: str = "tiny") -> InferenceRequest:
    return InferenceRequest(request_id=request_id, gateway=gateway, model=model, prompt_tokens=pack_tokens([1, 2, 3]))


async def until(fact: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    """Waits for a fact that nobody announces."""
    async with asyncio.timeout(timeout_s):
        while not fact():
            await asyncio.sleep(0.005)


@dataclass
class Worker:
    """`slots` at once. `behave` is what the handler does; the default returns at once."""

    bus: Bus
    lane: str
    slots: int = 4
    ack_wait_s: float = 10.0
    max_deliveries: int = 3
    behave: Callable[[Delivery[PrefillJob]], Awaitable[None]] | None = None
    handled: list[Delivery[PrefillJob]] = field(default_factory=list)
    failed: list[tuple[str, JetwakeError]] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    paused: bool = False

    def __post_init__(self) -> None:
        self.publisher = Publisher(self.bus)
        self.consumer = Consumer[PrefillJob](
            self.bus, self.publisher, self.spec, PrefillJob, self._handle, self.room, self._fail, "prefill", "w1", self.max_deliveries
        )

    @property
    def spec(self) -> ConsumerSpec:
        return replace(prefill_consumer(self.lane), ack_wait_s=self.ack_wait_s)

    def room(self) -> int:
        return 0 if self.paused else self.slots - self.running

    async def _handle(self, delivery: Delivery[PrefillJob]) -> None:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        self.handled.append(delivery)
        try:
            if self.behave is not None:
                await self.behave(delivery)
        finally:
            self.running -= 1

    async def _fail(self, delivery: Delivery[PrefillJob], error: JetwakeError) -> None:
        self.failed.append((delivery.message.request.request_id, error))

    async def put(self, *request_ids: str) -> None:
        for request_id in request_ids:
            job = PrefillJob(request=request(request_id), router="router")
            await self.publisher.store(subjects.prefill(self.lane), job, message_id=f"{self.lane}:{request_id}")

    @property
    def handled_ids(self) -> list[str]:
        return [delivery.message.request.request_id for delivery in self.handled]

    @asynccontextmanager
    async def running_consumer(self) -> AsyncIterator[Consumer[PrefillJob]]:
        async with asyncio.TaskGroup() as tasks:
            run = tasks.create_task(self.consumer.run())
            yield self.consumer
            await self.consumer.stop(grace_s=0.0)
            await run
