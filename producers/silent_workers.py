"""Names workers whose prefills are followed by no KV events: of those the prefix index knows nothing, and they are routed to by load.

Reads load reports, in which each worker compares its prefills with what it told. Promises: one warning for each incarnation.
"""

import logging
from collections.abc import Iterable

from ..schemas.workers import WorkerLoad

log = logging.getLogger(__name__)

SILENT_AFTER_S = 10.0


def silent_workers(loads: Iterable[WorkerLoad]) -> dict[str, float]:
    """By worker: for how many seconds no events followed a prefill that must have changed its cache. Pure."""
    return {load.worker: round(load.kv_silent_s, 1) for load in loads if load.kv_silent_s >= SILENT_AFTER_S}


class SilenceAlarm:
    """`expects_events` False (engines that tell none): never warns."""

    def __init__(self, expects_events: bool = True) -> None:
        self._expects_events = expects_events
        self._named: set[str] = set()

    def look(self, lane: str, load: WorkerLoad) -> None:
        if not self._expects_events or lane in self._named:
            return
        for worker, silent_s in silent_workers([load]).items():
            self._named.add(lane)
            log.warning(
                "no KV events from %s for %.0f s after a prefill: its cache is unknown here, and it is routed to by load alone. "
                "Switch its engine's prefix caching and KV events on, or run routers with approximate_s",
                worker,
                silent_s,
            )

    def forget(self, lane: str) -> None:
        self._named.discard(lane)
