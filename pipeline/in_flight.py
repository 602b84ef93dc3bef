"""What this process holds, and what of it must stop: cancels and deadlines, tested at every step and acted on in the middle of work.

Reads `jw.cancel.>`, live and what is stored of it, so that a process that was away or is new misses none; asks who still reads
replies (`readers`). `check` tests before a phase; `guard` surrounds a phase and ends it the moment the request is cancelled, its
deadline (server time) passes, or this process must let go of it (`leave`). Cancels are remembered for a while, because one may
overtake the request it is about.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from pydantic import ValidationError

from ..schemas import subjects
from ..schemas.codec import decode
from ..schemas.errors import DeadlineExceeded, JetwakeError, RequestCancelled, RequestEnded, RequestSuperseded, StreamMissing, Undecodable
from ..schemas.replies import CancelRequest
from ..schemas.requests import InferenceRequest
from ..schemas.streams import CANCEL
from .clock import ServerClock
from .connection import Bus, RawMessage, Subscription
from .jetstream import SUBJECT_HEADER, stored_messages
from .patience import when_ready
from .readers import Readers

log = logging.getLogger(__name__)

REMEMBERED_CANCELS = 100_000
ALL_ATTEMPTS = 1 << 30


@dataclass(frozen=True)
class _Scope:
    request: InferenceRequest
    timeout: asyncio.Timeout


class InFlight:
    """One for each process. All methods belong to the event loop's thread."""

    def __init__(self, bus: Bus, clock: ServerClock) -> None:
        self._bus = bus
        self._clock = clock
        self._ended: OrderedDict[str, int] = OrderedDict()
        self._scopes: dict[str, _Scope] = {}
        self._subscription: Subscription | None = None
        self._readers = Readers(bus, self._on_gone)
        self._left: JetwakeError | None = None
        self._listeners: list[Callable[[str], None]] = []

    async def start(self) -> None:
        """Knows all cancels on return."""
        self._subscription = await self._bus.subscribe(subjects.CANCELS, self._on_cancel)
        await self._bus.flush()
        await when_ready(self._bus, self._read_stored)

    async def run(self) -> None:
        """Beside the work, until cancelled."""
        remove = self._bus.on_reconnect(self._read_stored)
        try:
            await self._readers.run()
        finally:
            remove()

    def __len__(self) -> int:
        return len(self._scopes)

    def on_cancel(self, callback: Callable[[str], None]) -> None:
        """`callback` gets the id of each request that is cancelled, whoever holds it."""
        self._listeners.append(callback)

    def leave(self, error: JetwakeError) -> None:
        """Every phase that runs ends with `error`, and none can begin: this process lets go of all it holds."""
        self._left = error
        for scope in list(self._scopes.values()):
            _end_now(scope)

    def ending(self, request: InferenceRequest, where: str) -> RequestEnded | None:
        """How this attempt was ended by others, if it was: cancelled, read by nobody, or replaced by a later attempt."""
        if request.cancel_when_unread and self._readers.is_gone(request.gateway):
            return RequestCancelled(f"cancelled {where}: {request.gateway}, who reads the replies, is gone")
        below_attempt = self._ended.get(request.request_id)
        if below_attempt is None:
            return None
        if below_attempt == ALL_ATTEMPTS:
            return RequestCancelled(f"cancelled {where}")
        return RequestSuperseded(f"superseded {where}") if request.attempt < below_attempt else None

    def expired(self, request: InferenceRequest, where: str) -> RequestEnded | None:
        """As `ending`, and the deadline too."""
        if ending := self.ending(request, where):
            return ending
        if request.deadline_ns and self._clock.now_ns() >= request.deadline_ns:
            return DeadlineExceeded(f"deadline passed {where}")
        return None

    def check(self, request: InferenceRequest, phase: str) -> None:
        """Raises RequestCancelled, RequestSuperseded or DeadlineExceeded; `phase` goes into the text."""
        if ending := self.expired(request, f"before {phase}"):
            raise ending

    @asynccontextmanager
    async def guard(self, request: InferenceRequest, phase: str) -> AsyncGenerator[None]:
        """Ends its body with what `check` raises when that comes true, or with the error of `leave`, after the body's own clean-up."""
        self.check(request, phase)
        if self._left is not None:
            raise self._left
        scope: _Scope | None = None
        try:
            async with asyncio.timeout(self._remaining_s(request)) as timeout:
                scope = self._scopes[request.request_id] = _Scope(request, timeout)
                if request.cancel_when_unread:
                    self._readers.watch(request.gateway)
                yield
        except TimeoutError:
            if scope is None or not scope.timeout.expired():
                raise
            if ending := self.expired(request, f"during {phase}"):
                raise ending from None
            if self._left is not None:
                raise self._left from None
            raise DeadlineExceeded(f"deadline passed during {phase}") from None  # by a hair: the clock was set meanwhile
        finally:
            if self._scopes.get(request.request_id) is scope:
                del self._scopes[request.request_id]

    def _remaining_s(self, request: InferenceRequest) -> float | None:
        return max(0.0, (request.deadline_ns - self._clock.now_ns()) / 1e9) if request.deadline_ns else None

    async def _read_stored(self) -> None:
        """What was said before this process listened, or while its connection was down."""
        try:
            for message in await stored_messages(self._bus, CANCEL.name, subjects.CANCELS):
                self._on_cancel(message)
        except StreamMissing:  # kept in memory: after a restart of the broker there are none
            log.debug("there is no stream of cancels now")

    def _on_cancel(self, message: RawMessage) -> None:
        try:
            # Applications without msgpack send an empty message: the subject says all.
            subject = message.headers.get(SUBJECT_HEADER, message.subject)
            cancel = decode(message.data, CancelRequest) if message.data else CancelRequest(request_id=subjects.last_token(subject))
        except (Undecodable, ValidationError) as error:
            log.warning("a cancel that cannot be read: %s", error)
            return
        below_attempt = cancel.below_attempt or ALL_ATTEMPTS
        self._ended[cancel.request_id] = max(below_attempt, self._ended.get(cancel.request_id, 0))
        if len(self._ended) > REMEMBERED_CANCELS:
            self._ended.popitem(last=False)
        scope = self._scopes.get(cancel.request_id)
        if scope is not None and scope.request.attempt < below_attempt:
            _end_now(scope)
        if below_attempt == ALL_ATTEMPTS:
            for listener in self._listeners:
                listener(cancel.request_id)

    def _on_gone(self, gateway: str) -> None:
        for scope in list(self._scopes.values()):
            if scope.request.gateway == gateway and scope.request.cancel_when_unread:
                _end_now(scope)


def _end_now(scope: _Scope) -> None:
    if not scope.timeout.expired():
        scope.timeout.reschedule(asyncio.get_running_loop().time())
