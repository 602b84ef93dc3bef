"""Queues of dead workers: what waits there is given to the living, with the next attempt as the fence against a late revival.

Reads the subjects of `JW_PREFILL` and the worker cards; takes a dead incarnation's consumer away, reads its queue through a durable
of its own, and puts each request back on `jw.requests.<model>.<class>`. Several routers may run this: only one gets the durable.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable

from ..pipeline.connection import Bus
from ..pipeline.consume import Consumer, Delivery
from ..pipeline.endings import Endings
from ..pipeline.publish import Publisher
from ..pipeline.registry import Registry
from ..pipeline.topology import delete_consumer, durables, ensure_consumer, subject_counts
from ..schemas.errors import BusError, JetwakeError, NoWorker
from ..schemas.prefill import PrefillJob
from ..schemas.streams import PREFILL, takeover_consumer
from ..schemas.subjects import last_token, worker_of

log = logging.getLogger(__name__)

SWEEP_EVERY_S = 1.0
FIRST_SWEEP_AFTER_S = 5.0
"""A router may have started together with the broker: until then workers have renewed their cards."""
EMPTY_LANE_AFTER_S = 10.0
"""A lane without work is in nobody's way, and its worker may be starting: its consumer is taken away when no card came for so long."""
SLOTS = 64


class Takeover:
    """`had_taken` says whether a dead lane had taken the job with this sequence: only then may the job be why it died."""

    def __init__(
        self,
        bus: Bus,
        publisher: Publisher,
        endings: Endings,
        registry: Registry,
        router: str,
        had_taken: Callable[[str, int], bool],
    ) -> None:
        self._bus = bus
        self._publisher = publisher
        self._endings = endings
        self._registry = registry
        self._router = router
        self._had_taken = had_taken
        self._suspects: frozenset[str] = frozenset()
        self._empty_since_s: dict[str, float] = {}
        self._taken = 0

    async def run(self) -> None:
        """Sweeps until cancelled. An owner must be missing in two sweeps: a new worker's card may come just after its queue."""
        await asyncio.sleep(FIRST_SWEEP_AFTER_S)
        while True:
            await asyncio.sleep(SWEEP_EVERY_S)
            if not self._registry.settled:  # after an outage all cards expire together: no verdicts until they are back
                self._suspects = frozenset()
                self._empty_since_s.clear()
                continue
            try:
                orphans = frozenset(orphaned((await subject_counts(self._bus, PREFILL.name)).keys(), self._lanes()))
                for lane in orphans & self._suspects:
                    await self._empty(lane)
                self._suspects = orphans
                await self._remove_empty(orphans)
            except BusError as error:
                log.warning("cannot look for queues of dead workers now: %s", error)

    async def _remove_empty(self, with_work: frozenset[str]) -> None:
        """Consumers that dead workers left without work: else each death would leave one more, for minutes."""
        now_s = asyncio.get_running_loop().time()
        left = {name for name in await durables(self._bus, PREFILL.name) if not name.startswith(takeover_consumer("").durable)}
        ownerless = left - self._lanes() - with_work
        self._empty_since_s = {lane: self._empty_since_s.get(lane, now_s) for lane in ownerless}
        for lane, since_s in list(self._empty_since_s.items()):
            if now_s - since_s >= EMPTY_LANE_AFTER_S:
                log.info("worker %s is gone, and so is its queue", lane)
                await delete_consumer(self._bus, PREFILL.name, lane)
                del self._empty_since_s[lane]

    def _lanes(self) -> set[str]:
        return {card.lane for card in self._registry.workers.values()}

    async def _empty(self, lane: str) -> None:
        """Raises BusError; what is not moved then is found by the next sweep."""
        log.warning("worker %s is gone with work in its queue: routing that again", lane)
        spec = takeover_consumer(lane)
        await delete_consumer(self._bus, PREFILL.name, lane)
        await ensure_consumer(self._bus, spec)
        consumer = Consumer(
            self._bus, self._publisher, spec, PrefillJob, self._again, self._room, self._fail, stage="takeover", worker=self._router
        )
        # Not in a TaskGroup: what is raised here must reach the sweep as what it is.
        running = asyncio.create_task(consumer.run())
        try:
            while not running.done() and await self._left(lane):
                await asyncio.sleep(0.05)
            await consumer.stop(grace_s=5.0)
        finally:
            running.cancel()  # when the broker went away: what is in hand goes back
            await asyncio.wait([running])
        if not running.cancelled():
            running.result()
        await delete_consumer(self._bus, spec.stream, spec.durable)

    async def _left(self, lane: str) -> int:
        return (await subject_counts(self._bus, PREFILL.name)).get(f"jw.prefill.{lane}", 0)

    def _room(self) -> int:
        return SLOTS - self._taken

    async def _again(self, delivery: Delivery[PrefillJob]) -> None:
        self._taken += 1
        try:
            request, lane = delivery.message.request, last_token(delivery.subject)
            error = NoWorker("the worker that had this request died")
            await self._endings.again(request, error, is_fault=self._had_taken(lane, delivery.sequence), worker=worker_of(lane))
        finally:
            self._taken -= 1

    async def _fail(self, delivery: Delivery[PrefillJob], error: JetwakeError) -> None:
        await self._endings.failed(delivery.message.request, error)


def orphaned(queues: Iterable[str], lanes: set[str]) -> set[str]:
    """The lanes of these queue subjects that no living worker has. Pure."""
    return {last_token(subject) for subject in queues} - lanes
