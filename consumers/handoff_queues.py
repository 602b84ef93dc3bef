"""The queues that a decode worker takes handoffs from: that of its own topology domain, and those of the other domains of its pool.

Reads the registry and the subjects stored in `JW_HANDOFF`; declares a durable for each domain of which there are handoffs or prefill
workers, and takes away one that nobody needs any more. Promises: over all queues never more is asked for than there is room
(`decode_seats` says how much where); handoffs of a domain whose workers are all gone are taken too.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Protocol

from ..pipeline.connection import Bus
from ..pipeline.consume import Consumer
from ..pipeline.registry import Registry
from ..pipeline.topology import delete_consumer, ensure_consumer, subject_counts
from ..schemas.decode import KvHandoff
from ..schemas.errors import BusError
from ..schemas.streams import HANDOFF, ConsumerSpec, decode_consumer
from ..schemas.subjects import domain_token, handoff, last_token
from ..schemas.workers import WorkerCard
from .decode_seats import DecodeLoad, far_seats, near_seats, takes_turns

log = logging.getLogger(__name__)

LOOK_EVERY_S = 5.0
"""Cards tell of domains at once; what dead workers left in one of which nobody is alive is found so."""
TURN_S = 0.05
LEAVE_GRACE_S = 60.0


class MakeConsumer(Protocol):
    def __call__(
        self, spec: ConsumerSpec, wanted: Callable[[], Mapping[int, int]], moved: Callable[[], None], /
    ) -> Consumer[KvHandoff]: ...


class HandoffQueues:
    """`room`: how many more handoffs fit now. `load`: what is in hand."""

    def __init__(
        self, bus: Bus, registry: Registry, card: WorkerCard, room: Callable[[], int], load: Callable[[], DecodeLoad], make: MakeConsumer
    ) -> None:
        self._bus = bus
        self._registry = registry
        self._pool = card.pool
        self._near = domain_token(card.domain)
        self._room = room
        self._load = load
        self._make = make
        self._queues: dict[str, Consumer[KvHandoff]] = {}
        self._leaving = set[str]()
        self._turn = random.randrange(1 << 16)  # not all workers at the same place
        self._changed = asyncio.Event()
        self._stopping = False
        self._grace_s = 0.0
        self._ended = asyncio.Event()
        self._ended.set()
        registry.on_change(self._changed.set)

    @property
    def in_hand(self) -> int:
        return sum(queue.in_hand for queue in self._queues.values())

    def room_changed(self) -> None:
        for queue in self._queues.values():
            queue.reconsider()

    async def declare(self) -> None:
        """The own domain's durable, before anybody sends work. Raises BusError."""
        await ensure_consumer(self._bus, decode_consumer(self._pool, self._near))

    async def run(self) -> None:
        """Until `stop`, or until cancelled: then everything in hand is handed back."""
        self._ended.clear()
        try:
            async with asyncio.TaskGroup() as tasks:
                self._start(self._near, tasks)
                turning = tasks.create_task(self._take_turns())
                while not self._stopping:
                    self._changed.clear()
                    await self._follow_domains(tasks)
                    with suppress(TimeoutError):
                        async with asyncio.timeout(LOOK_EVERY_S):
                            await self._changed.wait()
                turning.cancel()
                await asyncio.gather(*(queue.stop(self._grace_s) for queue in self._queues.values()))
        finally:
            self._ended.set()

    async def stop(self, grace_s: float) -> None:
        """As `Consumer.stop`, for all of them."""
        self._grace_s = grace_s
        self._stopping = True
        self._changed.set()
        await self._ended.wait()

    # -- which queues there are -----------------------------------------------------------------------------------------

    async def _follow_domains(self, tasks: asyncio.TaskGroup) -> None:
        looked, stored = True, dict[str, int]()
        try:
            stored = await subject_counts(self._bus, HANDOFF.name, handoff(self._pool, "*"))
        except BusError as error:  # then cards alone tell of domains, and no queue is left
            log.info("cannot look for handoffs of other domains now: %s", error)
            looked = False
        needed = {self._near} | {last_token(subject) for subject in stored} | domains_of(self._pool, self._registry.workers)
        for token in sorted(needed - self._queues.keys()):
            self._start(token, tasks)
        if looked and self._registry.settled:
            for token in self._queues.keys() - needed - self._leaving:
                self._leaving.add(token)
                tasks.create_task(self._leave(token))

    def _start(self, token: str, tasks: asyncio.TaskGroup) -> None:
        queue = self._make(decode_consumer(self._pool, token), partial(self._wanted, token), self.room_changed)
        self._queues[token] = queue
        tasks.create_task(queue.run(), name=f"handoffs-{token}")
        self.room_changed()

    async def _leave(self, token: str) -> None:
        """Nobody is there any more, and nothing waits. Whoever misses the durable later declares it again."""
        log.info("no more handoffs of the domain %s", token)
        await self._queues[token].stop(LEAVE_GRACE_S)
        try:
            if not await subject_counts(self._bus, HANDOFF.name, handoff(self._pool, token)):
                await delete_consumer(self._bus, HANDOFF.name, decode_consumer(self._pool, token).durable)
        except BusError as error:
            log.info("the durable of the domain %s stays: %s", token, error)
        del self._queues[token]
        self._leaving.discard(token)
        self._changed.set()

    # -- how much is asked for where --------------------------------------------------------------------------------------

    def _wanted(self, token: str) -> Mapping[int, int]:
        """By priority. What is on its way from another queue is not asked for here, so that all together fit."""
        arrived = sum(queue.unbegun for queue in self._queues.values())
        free = max(0, self._room() - arrived)
        far = sorted(self._queues.keys() - self._leaving - {self._near})
        offered = far_seats(free, len(far), self._turn)
        elsewhere = sum(queue.outstanding for other, queue in self._queues.items() if other != token)
        if token == self._near:
            return near_seats(self._load(), arrived, min(free - sum(offered.values()), free - elsewhere))
        count = offered.get(far.index(token), 0) if token in far else 0
        return {self._load().far_priority(): max(0, min(count, free - elsewhere))}

    async def _take_turns(self) -> None:
        while True:
            await asyncio.sleep(TURN_S)
            self._turn += 1
            if takes_turns(self._room(), len(self._queues) - 1):
                self.room_changed()


def domains_of(pool: str, cards: Mapping[str, WorkerCard]) -> set[str]:
    """The domains, as tokens, from which workers of this pool hand off, or where they take handoffs. Pure."""
    return {domain_token(card.domain) for card in cards.values() if card.pool == pool and card.role in ("prefill", "decode")}
