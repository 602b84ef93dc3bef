"""What this process holds, and what of it must stop: cancels and deadlines, tested at every step and acted on in the middle of work.

Reads `jw.cancel.>`. `check` tests before a phase; `guard` surrounds a phase and ends it the moment the request is cancelled or
its deadline (server time) passes. Cancels are remembered for a while, because one may overtake the request it is about.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from ..schemas import subjects
from ..schemas.errors import DeadlineExceeded, RequestCancelled
from ..schemas.requests import InferenceRequest
from .clock import ServerClock
from .connection import Bus, RawMessage, Subscription

REMEMBERED_CANCELS = 100_000


class InFlight:
    """One for each process. All methods belong to the event loop's thread."""

    def __init__(self, bus: Bus, clock: ServerClock) -> None:
        self._bus = bus
        self._clock = clock
        self._cancelled: OrderedDict[str, None] = OrderedDict()
        self._scopes: dict[str, asyncio.Timeout] = {}
        self._subscription: Subscription | None = None

    async def start(self) -> None:
        self._subscription = await self._bus.subscribe(subjects.CANCELS, self._on_cancel)

    def __len__(self) -> int:
        return len(self._scopes)

    def is_cancelled(self, request_id: str) -> bool:
        return request_id in self._cancelled

    def check(self, request: InferenceRequest, phase: str) -> None:
        """Raises RequestCancelled or DeadlineExceeded; `phase` goes into the text."""
        if self.is_cancelled(request.request_id):
            raise RequestCancelled(f"cancelled before {phase}")
        if request.deadline_ns and self._clock.now_ns() >= request.deadline_ns:
            raise DeadlineExceeded(f"deadline passed before {phase}")

    @asynccontextmanager
    async def guard(self, request: InferenceRequest, phase: str) -> AsyncGenerator[None]:
        """Ends its body with RequestCancelled or DeadlineExceeded when either happens, after the body's own clean-up."""
        self.check(request, phase)
        scope: asyncio.Timeout | None = None
        try:
            async with asyncio.timeout(self._remaining_s(request)) as scope:
                self._scopes[request.request_id] = scope
                yield
        except TimeoutError:
            if scope is None or not scope.expired():
                raise
            if self.is_cancelled(request.request_id):
                raise RequestCancelled(f"cancelled during {phase}") from None
            raise DeadlineExceeded(f"deadline passed during {phase}") from None
        finally:
            if self._scopes.get(request.request_id) is scope:
                del self._scopes[request.request_id]

    def _remaining_s(self, request: InferenceRequest) -> float | None:
        return max(0.0, (request.deadline_ns - self._clock.now_ns()) / 1e9) if request.deadline_ns else None

    def _on_cancel(self, message: RawMessage) -> None:
        request_id = subjects.last_token(message.subject)
        self._cancelled[request_id] = None
        if len(self._cancelled) > REMEMBERED_CANCELS:
            self._cancelled.popitem(last=False)
        scope = self._scopes.get(request_id)
        if scope is not None:
            scope.reschedule(asyncio.get_running_loop().time())
