"""Ends requests that wait in a worker's queue when they are cancelled or their deadline passes: nobody waits for their turn to hear of it.

Reads the router's own view; writes terminals, and takes the jobs off their queue. What another router sent there is ended by that
one, and at the latest by the worker whose turn it is.
"""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import suppress

from ..pipeline.about import about
from ..pipeline.connection import Bus
from ..pipeline.endings import Endings
from ..pipeline.in_flight import InFlight
from ..pipeline.topology import delete_message
from ..schemas.errors import BusError, RequestEnded
from ..schemas.requests import InferenceRequest
from ..schemas.streams import PREFILL
from ..schemas.subjects import message_id
from .lane_ledger import Booking
from .router import Router

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
"""For deadlines; a cancel is acted on at once."""


class QueueEndings:
    def __init__(self, bus: Bus, router: Router, endings: Endings, in_flight: InFlight) -> None:
        self._bus = bus
        self._router = router
        self._endings = endings
        self._in_flight = in_flight
        self._cancelled = asyncio.Event()
        in_flight.on_cancel(lambda _: self._cancelled.set())

    async def run(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY_S):
                    await self._cancelled.wait()
            self._cancelled.clear()
            for booking, request, ending in list(self._ended()):
                await self._end(booking, request, ending)

    def _ended(self) -> Iterator[tuple[Booking, InferenceRequest, RequestEnded]]:
        for lane in {candidate.lane for choice in self._router.fleets().values() for candidate in choice}:
            for booking in self._router.queued(lane):
                request = self._router.decided(booking)
                ending = request and self._in_flight.expired(request, "while it waited for a worker")
                if request and ending:
                    yield booking, request, ending

    async def _end(self, booking: Booking, request: InferenceRequest, ending: RequestEnded) -> None:
        try:
            await self._endings.ended_early(request, ending)
            await delete_message(self._bus, PREFILL.name, booking.sequence, message_id(request.request_id, "prefill", request.attempt))
            self._router.withdraw(booking)
        except BusError as error:
            log.warning("%s waits on although it has ended: %s", request.request_id, error, extra=about(request))
