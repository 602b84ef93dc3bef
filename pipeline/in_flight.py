"""What this process holds, and what of it must stop: cancels and deadlines, tested at every step and acted on in the middle of work.

Reads `jw.cancel.>`. `check` tests before a phase; `guard` surrounds a phase and ends it the moment the request is cancelled or
its deadline (server time) passes. Cancels are remembered for a while, because one may overtake the request it is about.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from ..schemas import subjects
from ..schemas.codec import decode
from ..schemas.errors import DeadlineExceeded, RequestCancelled, RequestEnded, RequestSuperseded, Undecodable
from ..schemas.replies import CancelRequest
from ..schemas.requests import InferenceRequest
from .clock import ServerClock
from .connection import Bus, RawMessage, Subscription

log = logging.getLogger(__name__)

REMEMBERED_CANCELS = 100_000
ALL_ATTEMPTS = 1 << 30


class InFlight:
    """One for each process. All methods belong to the event loop's thread."""

    def __init__(self, bus: Bus, clock: ServerClock) -> None:
        self._bus = bus
        self._clock = clock
        self._ended: OrderedDict[str, int] = OrderedDict()
        self._scopes: dict[str, tuple[int, asyncio.Timeout]] = {}
        self._subscription: Subscription | None = None

    async def start(self) -> None:
        self._subscription = await self._bus.subscribe(subjects.CANCELS, self._on_cancel)

    def __len__(self) -> int:
        return len(self._scopes)

    def ending(self, request: InferenceRequest, where: str) -> RequestEnded | None:
        """How this attempt was ended by others, if it was: its owner cancelled the request, or a later attempt goes on."""
        below_attempt = self._ended.get(request.request_id)
        if below_attempt is None:
            return None
        if below_attempt == ALL_ATTEMPTS:
            return RequestCancelled(f"cancelled {where}")
        return RequestSuperseded(f"superseded {where}") if request.attempt < below_attempt else None

    def check(self, request: InferenceRequest, phase: str) -> None:
        """Raises RequestCancelled, RequestSuperseded or DeadlineExceeded; `phase` goes into the text."""
        if ending := self.ending(request, f"before {phase}"):
            raise ending
        if request.deadline_ns and self._clock.now_ns() >= request.deadline_ns:
            raise DeadlineExceeded(f"deadline passed before {phase}")

    @asynccontextmanager
    async def guard(self, request: InferenceRequest, phase: str) -> AsyncGenerator[None]:
        """Ends its body with what `check` raises when that comes true, after the body's own clean-up."""
        self.check(request, phase)
        scope: asyncio.Timeout | None = None
        try:
            async with asyncio.timeout(self._remaining_s(request)) as scope:
                self._scopes[request.request_id] = (request.attempt, scope)
                yield
        except TimeoutError:
            if scope is None or not scope.expired():
                raise
            if ending := self.ending(request, f"during {phase}"):
                raise ending from None
            raise DeadlineExceeded(f"deadline passed during {phase}") from None
        finally:
            if self._scopes.get(request.request_id) == (request.attempt, scope):
                del self._scopes[request.request_id]

    def _remaining_s(self, request: InferenceRequest) -> float | None:
        return max(0.0, (request.deadline_ns - self._clock.now_ns()) / 1e9) if request.deadline_ns else None

    def _on_cancel(self, message: RawMessage) -> None:
        try:
            cancel = decode(message.data, CancelRequest)
        except Undecodable as error:
            log.warning("a cancel that cannot be read: %s", error)
            return
        below_attempt = cancel.below_attempt or ALL_ATTEMPTS
        self._ended[cancel.request_id] = max(below_attempt, self._ended.get(cancel.request_id, 0))
        if len(self._ended) > REMEMBERED_CANCELS:
            self._ended.popitem(last=False)
        attempt, scope = self._scopes.get(cancel.request_id, (below_attempt, None))
        if scope is not None and attempt < below_attempt:
            scope.reschedule(asyncio.get_running_loop().time())
