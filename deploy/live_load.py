"""What a running system's queues, slots and caches look like while a bench is on: one look each second, from the bus.

Reads load reports and worker cards, and asks the broker how much waits in the queues. Pools are the roles of the workers, as in a
replay; what no router has taken yet is the pool `router`.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable

from ..pipeline.connection import Bus
from ..pipeline.raw import RawMessage
from ..pipeline.registry import Registry
from ..pipeline.topology import QueueCount, consumer_counts
from ..schemas import subjects
from ..schemas.codec import decode
from ..schemas.errors import BusError, Undecodable
from ..schemas.workers import WorkerCard, WorkerLoad
from .capacity.replay_result import QueueDepth, Series

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0


class LiveLoad:
    """`series` and `queue_depth` grow while `run` runs. `since_start_s`: the time of the bench, which a
    sample is given; there are none before 0."""

    def __init__(self, bus: Bus, since_start_s: Callable[[], float]) -> None:
        self.series = Series()
        self.queue_depth: dict[str, QueueDepth] = {}
        self._bus = bus
        self._registry = Registry(bus)
        self._since_start_s = since_start_s
        self._loads: dict[str, WorkerLoad] = {}

    async def run(self) -> None:
        """Until cancelled. A broker that does not answer costs samples, nothing else."""
        await self._bus.subscribe(subjects.LOADS, self._on_load)
        await self._registry.start()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._registry.run())
            while True:
                due_s = time.perf_counter() + LOOK_EVERY_S
                try:
                    counts = await consumer_counts(self._bus)
                    if self._since_start_s() >= 0:
                        self._note(counts)
                except BusError as error:
                    log.warning("no sample of the queues: %s", error)
                await asyncio.sleep(max(0.0, due_s - time.perf_counter()))

    @property
    def workers(self) -> list[WorkerCard]:
        """Those alive now."""
        return list(self._registry.workers.values())

    def _on_load(self, message: RawMessage) -> None:
        try:
            load = decode(message.data, WorkerLoad)
        except Undecodable:
            return  # of another version: its worker is counted without a load
        self._loads[f"{load.worker}-{load.incarnation}"] = load

    def _note(self, counts: dict[str, QueueCount]) -> None:
        cards = {card.lane: card for card in self._registry.workers.values()}
        waiting = _waiting_by_pool(counts, cards)
        running, used, blocks = defaultdict[str, int](int), defaultdict[str, int](int), defaultdict[str, int](int)
        for lane, card in cards.items():
            load = self._loads.get(lane)
            running[card.role] += load.running_requests if load else 0
            used[card.role] += load.used_blocks if load else 0
            blocks[card.role] += card.capacity_blocks
        series, before = self.series, len(self.series.at_s)
        series.at_s.append(self._since_start_s())
        for pool in {*waiting, *series.queue_depth}:
            series.queue_depth.setdefault(pool, [0] * before).append(waiting.get(pool, 0))
        for pool in {*running, *series.running}:
            series.running.setdefault(pool, [0] * before).append(running.get(pool, 0))
            fraction = used.get(pool, 0) / blocks[pool] if blocks.get(pool) else 0.0
            series.used_kv_fraction.setdefault(pool, [0.0] * before).append(fraction)
        for pool, depths in series.queue_depth.items():
            self.queue_depth[pool] = QueueDepth(sum(depths) / len(depths), max(depths))


def _waiting_by_pool(counts: dict[str, QueueCount], cards: dict[str, WorkerCard]) -> dict[str, int]:
    """What was delivered and is not settled runs; only what was not delivered waits."""
    role_of = {subjects.prefill(lane): card.role for lane, card in cards.items()}
    handoffs = tuple(subjects.handoff(card.pool, "") for card in cards.values())
    waiting = dict.fromkeys(role_of.values(), 0)
    for subject, count in counts.items():
        pool = role_of.get(subject, "decode" if subject.startswith(handoffs) else "router" if subject.startswith("jw.requests.") else "")
        if pool:
            waiting[pool] = waiting.get(pool, 0) + count.pending
    return waiting
