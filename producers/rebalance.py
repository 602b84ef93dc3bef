"""A job that waits behind others while another worker idles is taken back and routed again.

Reads the router's own view; writes the request with the next attempt, a notice that fences the old one, and takes the old job off
its queue, in this order: whatever dies in between, the request is somewhere, and the attempt says which one counts.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ..pipeline.about import about
from ..pipeline.connection import Bus
from ..pipeline.endings import Endings
from ..pipeline.topology import delete_message
from ..schemas.errors import BusError, Overloaded
from ..schemas.requests import InferenceRequest
from ..schemas.streams import PREFILL
from ..schemas.subjects import message_id
from .fleet import Candidate
from .lane_ledger import Booking
from .router import Router

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.1
LEAST_GAIN_S = 0.25
"""A move costs a few milliseconds of the bus and forgoes a cached prefix: it must be worth it."""


@dataclass(frozen=True)
class Waiting:
    """A job that its worker has not taken. `before_s`: expected work there until its turn; `elsewhere_s`: its prefill with no cache."""

    request: InferenceRequest
    booking: Booking
    before_s: float
    elsewhere_s: float


def moves(waiting: Sequence[Waiting], choice: Sequence[Candidate]) -> list[Waiting]:
    """At most one job for each idle worker: those that gain most. Only from workers with no free slot, who cannot just take it. Pure."""
    idle = sum(candidate.load == 0 and candidate.free_slots > 0 and candidate.role != "decode" for candidate in choice)
    full = {candidate.lane for candidate in choice if candidate.free_slots <= 0}
    gains = [(job.before_s - job.elsewhere_s, job) for job in waiting if job.booking.lane in full and job.booking.sequence]
    worth = sorted((gain for gain in gains if gain[0] > LEAST_GAIN_S), key=lambda gain: gain[0], reverse=True)
    return [job for _, job in worth[:idle]]


class Rebalancer:
    def __init__(self, bus: Bus, router: Router, endings: Endings) -> None:
        self._bus = bus
        self._router = router
        self._endings = endings

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            for waiting, choice in waiting_by_model(self._router):
                for job in moves(waiting, choice):
                    await self._move(job)

    async def _move(self, job: Waiting) -> None:
        log.info(
            "%s waits %.2f s on %s: routing it again", job.request.request_id, job.before_s, job.booking.lane, extra=about(job.request)
        )
        try:
            error = Overloaded(f"another worker is idle, and {job.booking.lane} is not")
            await self._endings.again(job.request, error, is_fault=False)
            self._router.withdraw(job.booking)
            job_id = message_id(job.request.request_id, "prefill", job.request.attempt)
            await delete_message(self._bus, PREFILL.name, job.booking.sequence, job_id)
        except BusError as error:
            log.warning("%s stays where it is: %s", job.request.request_id, error, extra=about(job.request))


def waiting_by_model(router: Router) -> list[tuple[list[Waiting], tuple[Candidate, ...]]]:
    """What this router has routed and nobody has taken, with the workers there are for it."""
    found: list[tuple[list[Waiting], tuple[Candidate, ...]]] = []
    for model, choice in router.fleets().items():
        waiting: list[Waiting] = []
        for candidate in choice:
            before_s = candidate.work_s(time.monotonic()) - candidate.queued_work_s
            for booking in router.queued(candidate.lane):
                request = router.decided(booking)
                if request is not None and request.model == model:
                    elsewhere_s = candidate.timing.seconds(request.prompt_length_tokens)
                    waiting.append(Waiting(request, booking, before_s, elsewhere_s))
                before_s += booking.work_s
        found.append((waiting, choice))
    return found
