"""Credit: keeps as many messages asked for at the broker as the owner has room for, and never more.

Writes pull requests of one durable consumer; reads what comes to their inbox and hands messages on. Promises: `outstanding`
is at most what `wanted()` sums up to (when room shrinks, pulls are taken back); what arrives beyond it all the same is handed on too,
never dropped; pulls are issued again after a reconnect, silence, or loss of the consumer, which is declared again, without a hot loop.

Where the consumer has a priority group, the broker serves pulls of a lower number first, and those of one number in turn. What is
asked for at different priorities has an inbox each, so that each can be counted and taken back alone.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

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
GATHER_S = 0.002
"""While something is asked for, changes that come so close together are answered by one."""
_PULL_BYTES = 16 << 20
_HEARTBEAT = "100"
_STARTING = "it starts"


@dataclass
class _Asked:
    """What is asked for at one priority. `inbox`: of all its pulls."""

    inbox: str
    subscription: Subscription
    outstanding: int = 0


class StandingPull:
    """`wanted()`: by priority, how many messages may be on their way; a consumer without a priority group has 0 alone. `take`: called
    for each that arrives. `declare`: see `Consumer`; what it raises and is no BusError ends `run`. `moved`: called whenever
    `outstanding` has changed.
    """

    def __init__(
        self,
        bus: Bus,
        spec: ConsumerSpec,
        wanted: Callable[[], Mapping[int, int]],
        take: Callable[[RawMessage], None],
        declare: Callable[[], Awaitable[None]] | None = None,
        moved: Callable[[], None] = lambda: None,
    ) -> None:
        self._bus = bus
        self._spec = spec
        self._wanted = wanted
        self._take = take
        self._declare_own = declare
        self._moved = moved
        self._asked: dict[int, _Asked] = {}
        self._changed = asyncio.Event()
        self._pulls = 0
        self._failures = 0
        self._lost = _STARTING
        self._connection_is_new = asyncio.Event()
        self._heard = 0.0

    @property
    def outstanding(self) -> int:
        return sum(asked.outstanding for asked in self._asked.values())

    def reconsider(self) -> None:
        """Something changed: compare what is asked for with what is wanted."""
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
                    if self.outstanding and not self._lost:
                        await asyncio.sleep(GATHER_S)
                        self._changed.clear()
        finally:
            remove()
            await self._take_all_back()

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
        await self._take_all_back()
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
        for priority in too_much({priority: asked.outstanding for priority, asked in self._asked.items()}, self._wanted()):
            await self._take_back(priority)
        # Taking back took time, and messages may have come.
        for priority, batch in too_little({priority: asked.outstanding for priority, asked in self._asked.items()}, self._wanted()).items():
            try:
                await self._ask(priority, batch)
            except BusError as error:
                self._lose(f"{error.code}: {error}")
                return

    async def _ask(self, priority: int, batch: int) -> None:
        asked = self._asked.get(priority)
        if asked is None:
            inbox = self._bus.new_inbox()
            asked = _Asked(inbox, await self._bus.subscribe(f"{inbox}.*", partial(self._receive, priority)))
            self._asked[priority] = asked
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
        if self._spec.priority_group:
            pull |= {"group": self._spec.priority_group, "priority": priority}
        asked.outstanding += batch
        self._moved()
        subject = pull_subject(self._spec.stream, self._spec.durable)
        await self._bus.publish_with_reply(subject, json.dumps(pull).encode(), f"{asked.inbox}.{self._pulls}")

    async def _take_back(self, priority: int) -> None:
        """There is no order to cancel a pull; leaving its inbox does it. A new inbox is for the next ones."""
        asked = self._asked[priority]
        try:
            if self._bus.connected:
                await asked.subscription.drain(self._bus.settings.request_timeout_s)
            else:
                await asked.subscription.unsubscribe()
        finally:
            del self._asked[priority]
            self._moved()

    async def _take_all_back(self) -> None:
        for priority in list(self._asked):
            await self._take_back(priority)

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

    def _receive(self, priority: int, message: RawMessage) -> None:
        self._heard = asyncio.get_running_loop().time()
        if is_delivery(message):
            self._failures = 0
            self._came(priority, 1)
            self._take(message)
        elif message.status == _HEARTBEAT:
            self._failures = 0
            return
        elif PENDING_MESSAGES_HEADER in message.headers:  # this pull has ended, with so many messages not sent
            self._came(priority, int(message.headers[PENDING_MESSAGES_HEADER]))
        else:
            # Perhaps somebody takes the queue over: let them make their consumer before we make ours again.
            self._failures = max(self._failures, 2)
            self._lose(f"the broker said {message.status} {message.headers.get('Description', 'no responders')}")
        self._changed.set()

    def _came(self, priority: int, count: int) -> None:
        asked = self._asked.get(priority)
        if asked is not None:
            asked.outstanding = max(0, asked.outstanding - count)
            self._moved()


def too_much(outstanding: Mapping[int, int], wanted: Mapping[int, int]) -> list[int]:
    """The priorities to take back: while more is asked for than wanted, or while it looks better to the broker than it is. Pure.

    What stands behind the first of them may differ: only the first matters now, and each pull that is left alone costs nothing.
    """
    left = {priority: count for priority, count in outstanding.items() if count}
    first, total = min((priority for priority, count in wanted.items() if count), default=0), sum(wanted.values())
    back = [priority for priority in left if priority < first]
    for priority in sorted(left.keys() - set(back), reverse=True):
        if sum(left[one] for one in left if one not in back) <= total - (0 if first in left else 1):
            break  # with room for one at the first priority, where nothing is asked for yet
        back.append(priority)
    return back


def too_little(outstanding: Mapping[int, int], wanted: Mapping[int, int]) -> dict[int, int]:
    """By priority, how many more to ask for. Pure."""
    free, missing = sum(wanted.values()), sum(wanted.values()) - sum(outstanding.values())
    first = min((priority for priority, count in wanted.items() if count), default=0)
    if missing <= 0 or (missing <= free // 8 and outstanding.get(first, 0)):
        return {}  # with many outstanding, single freed slots are gathered: the broker still has enough to send
    more = dict[int, int]()
    for priority in sorted(wanted):
        count = min(missing, wanted[priority] - outstanding.get(priority, 0))
        if count > 0:
            more[priority] = count
            missing -= count
    return more
