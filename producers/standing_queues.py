"""Names queues that stand still: messages wait, somebody has room for them, and none is delivered. Nothing of that is usual.

Reads the broker's consumers of jobs and handoffs, cards and loads. Promises: one warning for each time that a queue stands.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping

from ..pipeline.connection import Bus
from ..pipeline.registry import Registry
from ..pipeline.topology import QueueCount, consumer_counts
from ..schemas.errors import BusError
from ..schemas.subjects import prefill
from ..schemas.workers import WorkerCard, WorkerLoad

log = logging.getLogger(__name__)

LOOK_EVERY_S = 10.0


def standing_queues(
    before: Mapping[str, QueueCount], now: Mapping[str, QueueCount], cards: Mapping[str, WorkerCard], loads: Mapping[str, WorkerLoad]
) -> dict[str, str]:
    """By subject: the queues of which nothing was delivered between two looks though both times messages waited and a worker has room
    by its own word, and what is known of them. `loads` is by lane. Pure.
    """
    found = dict[str, str]()
    for subject, count in now.items():
        earlier = before.get(subject)
        if earlier is None or not (count.pending and earlier.pending) or count.delivered != earlier.delivered:
            continue
        takers = [card.worker for card in cards.values() if _takes(card, subject) and (load := loads.get(card.lane)) and load.room > 0]
        if takers:
            found[subject] = f"{count.pending} wait and none is delivered, though {', '.join(sorted(takers))} has room"
    return found


def _takes(card: WorkerCard, subject: str) -> bool:
    if card.state != "ready":
        return False
    return subject == prefill(card.lane) or (card.role == "decode" and subject.startswith(f"jw.handoff.{card.pool}."))


class StandingQueuesAlarm:
    def __init__(self, bus: Bus, registry: Registry, loads: Callable[[], Mapping[str, WorkerLoad]]) -> None:
        self._bus = bus
        self._registry = registry
        self._loads = loads

    async def run(self) -> None:
        """Looks now and then, until cancelled."""
        before: Mapping[str, QueueCount] = {}
        named = set[str]()
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                now = await consumer_counts(self._bus)
            except BusError as error:
                log.info("cannot look at the queues now: %s", error)
                before = {}
                continue
            found = standing_queues(before, now, self._registry.workers, self._loads()) if self._registry.settled else {}
            for subject in found.keys() - named:
                log.warning("the queue %s stands still: %s. Is its consumer full, paused or without interest?", subject, found[subject])
            named, before = set(found), now
