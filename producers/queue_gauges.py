"""How much waits in the queues, for how long, as gauges: asked of the broker every few seconds, while somebody reads them.

Reads the consumers of the three work queues. Several routers tell the same: take the highest.
"""

import asyncio
import logging

from ..pipeline import instruments
from ..pipeline.clock import Clock
from ..pipeline.connection import Bus
from ..pipeline.queue_state import QueueState, queue_states
from ..schemas import signals
from ..schemas.errors import BusError
from ..schemas.streams import HANDOFF, PREFILL, REQUESTS
from ..schemas.subjects import last_token, worker_of

log = logging.getLogger(__name__)

ASK_EVERY_S = 3.0
_KINDS = {REQUESTS.name: "requests", PREFILL.name: "prefill", HANDOFF.name: "handoff"}


class QueueGauges:
    def __init__(self, bus: Bus, clock: Clock) -> None:
        self._bus = bus
        self._clock = clock

    async def run(self) -> None:
        while instruments.are_read():
            try:
                show(await queue_states(self._bus), self._clock.now_ns())
            except BusError as error:
                log.warning("the queues were not looked at: %s", error)
            await asyncio.sleep(ASK_EVERY_S)
        await asyncio.Event().wait()  # nobody reads: there is nothing to do, for as long as the process runs


def show(states: list[QueueState], now_ns: int) -> None:
    waiting: dict[tuple[str, ...], float] = {}
    in_hand: dict[tuple[str, ...], float] = {}
    ages: dict[tuple[str, ...], float] = {}
    for state in states:
        row = (_KINDS[state.stream], owner_of(state))
        waiting[row] = waiting.get(row, 0) + state.waiting
        in_hand[row] = in_hand.get(row, 0) + state.in_hand
        age_s = max(0, now_ns - state.oldest_ns) / 1e9 if state.oldest_ns else 0.0
        ages[row] = max(ages.get(row, 0.0), age_s)
    instruments.show_all(signals.QUEUE_WAITING, waiting)
    instruments.show_all(signals.QUEUE_IN_HAND, in_hand)
    instruments.show_all(signals.QUEUE_OLDEST_AGE, ages)


def owner_of(state: QueueState) -> str:
    """A class, a worker, a pool: never what is different for each request, or each start of a worker."""
    if state.stream == HANDOFF.name:
        return ".".join(state.subject.split(".")[2:])
    name = last_token(state.subject)
    return worker_of(name) if state.stream == PREFILL.name else name
