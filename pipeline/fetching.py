"""Credit: keeps as many messages asked for at the broker as the owner has room for, and never more.

Writes pull requests of one durable consumer; reads what comes to their inbox and hands messages on. Promises: `outstanding`
is at most `free()` (when room shrinks, pulls are taken back); what arrives beyond it all the same is handed on too, never
dropped; pulls are issued again after a reconnect, silence, or loss of the consumer, which is declared again, without a hot loop.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from ..schemas.errors import BusError, NotPermitted
from ..schemas.streams import ConsumerSpec
from .backoff import backoff_s
from .connection import Bus, Subscription
from .jetstream import PENDING_MESSAGES_HEADER, is_delivery, pull_subject
from .raw import RawMessage
from .topology import ensure_consumer

logger = logging.getLogger(__name__)

PULL_EXPIRES_S = 30.0
HEARTBEAT_S = 5.0
SILENCE_S = 2 * HEARTBEAT_S + 1.0
ASK_AGAIN_S = 0.25
_PULL_BYTES = 16 << 20
_HEARTBEAT = "100"
_STARTING = "it starts"


class StandingPull:
    """`free()`: how many messages may be on their way. `take`: called for each that arrives. `declare`: see `Consumer`; what it raises
    and is no BusError ends `run`.
    """

    def __init__(
        self,
        bus: Bus,
        spec: ConsumerSpec,
        free: Callable[[], int],
        take: Callable[[RawMessage], None],
        declare: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._bus = bus
        self._spec = spec
        self._free = free
        self._take = take
        self._declare_own = declare
        self.outstanding = 0
        self._changed = asyncio.Event()
        self._inbox = ""
        self._subscription: Subscription | None = None
        self._pulls = 0
        self._failures = 0
        self._lost = _STARTING
        self._connection_is_new = asyncio.Event()
        self._heard = 0.0

    def reconsider(self) -> None:
        """Something changed: compare what is asked for with what is free."""
        self._changed.set()

    async def run(self) -> None:
        """Until cancelled; then pulls are taken back, and what comes until the broker knows is handed on."""
        remove = self._bus.on_reconnect(self._begin_anew)
        try:
            while True:
                await self._bus.wait_connected()
                if self._lost:
                    await self._recover()
                else:
                    await self._adjust()
                    await self._wait_for_change()
        finally:
            remove()
            await self._take_back()

    async def _begin_anew(self) -> None:
        """The broker forgot our pulls with the connection, and perhaps the consumer too."""
        self._failures = 0
        self._lose("the connection is new")
        self._connection_is_new.set()

    def _lose(self, why: str) -> None:
        self._lost = why
        self._changed.set()

    async def _recover(self) -> None:
        """A fresh start with the consumer declared. Each try after a failed one waits longer, but no longer than for a reconnect."""
        self._connection_is_new.clear()
        if self._failures:
            with suppress(TimeoutError):
                async with asyncio.timeout(backoff_s(self._failures, first_s=0.1)):
                    await self._connection_is_new.wait()
        self._failures += 1
        await self._take_back()
        why, self._lost = self._lost, ""  # only now: the ends of other pulls said the same
        try:
            await self._declare()
        except BusError as error:
            self._lose(f"{error.code}: {error}")
        logger.log(logging.INFO if why != _STARTING else logging.DEBUG, "%s: fetching anew, because %s", self._spec.durable, why)

    async def _declare(self) -> None:
        try:
            await (self._declare_own() if self._declare_own is not None else ensure_consumer(self._bus, self._spec))
        except NotPermitted:  # then an admin declares it, and a missing one shows in the answer to the pull
            logger.debug("%s: not ours to declare", self._spec.durable)

    async def _adjust(self) -> None:
        if self.outstanding > max(0, self._free()):
            await self._take_back()
        free = max(0, self._free())
        wanted = free - self.outstanding
        # With many outstanding, single freed slots are gathered: the broker still has enough to send.
        if wanted > free // 8:
            try:
                await self._ask(wanted)
            except BusError as error:
                self._lose(f"{error.code}: {error}")

    async def _ask(self, batch: int) -> None:
        if self._subscription is None:
            self._inbox = self._bus.new_inbox()
            self._subscription = await self._bus.subscribe(f"{self._inbox}.*", self._receive)
        if self.outstanding == 0:
            self._heard = asyncio.get_running_loop().time()
        self._pulls += 1
        pull = {
            "batch": batch,
            "expires": round(PULL_EXPIRES_S * 1e9),
            "idle_heartbeat": round(HEARTBEAT_S * 1e9),
            # Enough for the largest message, and far from what the broker cuts a slow connection off for.
            "max_bytes": max(_PULL_BYTES, 2 * self._bus.max_payload_bytes),
        }
        self.outstanding += batch
        subject = pull_subject(self._spec.stream, self._spec.durable)
        await self._bus.publish_with_reply(subject, json.dumps(pull).encode(), f"{self._inbox}.{self._pulls}")

    async def _take_back(self) -> None:
        """There is no order to cancel a pull; leaving its inbox does it. A new inbox is for the next ones."""
        subscription, self._subscription = self._subscription, None
        if subscription is not None and self._bus.connected:
            await subscription.drain(self._bus.settings.request_timeout_s)
        elif subscription is not None:
            await subscription.unsubscribe()
        self.outstanding = 0

    async def _wait_for_change(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            # An owner that says nothing of new room is asked for it, so that a forgotten word costs no more than a moment.
            async with asyncio.timeout_at(self._heard + SILENCE_S if self.outstanding else loop.time() + ASK_AGAIN_S):
                await self._changed.wait()
        except TimeoutError:
            if self.outstanding and loop.time() >= self._heard + SILENCE_S:
                self._lose(f"nothing was heard for {SILENCE_S:g} s, not even a heartbeat")
        self._changed.clear()

    # -- what arrives -----------------------------------------------------------------------------------------------

    def _receive(self, message: RawMessage) -> None:
        self._heard = asyncio.get_running_loop().time()
        if is_delivery(message):
            self._failures = 0
            self.outstanding = max(0, self.outstanding - 1)
            self._take(message)
        elif message.status == _HEARTBEAT:
            self._failures = 0
            return
        elif PENDING_MESSAGES_HEADER in message.headers:  # this pull has ended, with so many messages not sent
            self.outstanding = max(0, self.outstanding - int(message.headers[PENDING_MESSAGES_HEADER]))
        else:
            # Perhaps somebody takes the queue over: let them make their consumer before we make ours again.
            self._failures = max(self._failures, 2)
            self._lose(f"the broker said {message.status} {message.headers.get('Description', 'no responders')}")
        self._changed.set()
