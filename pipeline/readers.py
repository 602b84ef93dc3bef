"""Whether somebody still reads the replies of a gateway: asked only about those whose requests want it.

Asks on `jw.present.<gateway>`, where every reader of replies has a subscription that need not answer: the broker itself says so when
there is none, and says it before it answers a ping that was sent later. One question for each gateway every two seconds, however many
requests it has. Promises: a gateway is gone only when the broker said so again and again for `GONE_AFTER_S`; a broker that is away
says nothing.
"""

import asyncio
import logging
from collections.abc import Callable

from ..schemas import subjects
from ..schemas.errors import BusError
from .connection import Bus, RawMessage

log = logging.getLogger(__name__)

ASK_EVERY_S = 2.0
GONE_AFTER_S = 5.0
"""A reader that reconnects is back much sooner."""
WATCHED_FOR_S = 60.0
NOBODY = "503"


class Readers:
    """`on_gone` is told of each gateway once when it has gone."""

    def __init__(self, bus: Bus, on_gone: Callable[[str], None]) -> None:
        self._bus = bus
        self._on_gone = on_gone
        self._watched_until: dict[str, float] = {}
        self._absent_since: dict[str, float] = {}
        self._gone: set[str] = set()
        self._something = asyncio.Event()

    def watch(self, gateway: str) -> None:
        self._watched_until[gateway] = asyncio.get_running_loop().time() + WATCHED_FOR_S
        self._something.set()

    def is_gone(self, gateway: str) -> bool:
        if gateway not in self._watched_until:
            self.watch(gateway)
        return gateway in self._gone

    async def run(self) -> None:
        while True:
            await self._something.wait()
            for gateway in list(self._watched_until):
                await self._ask(gateway)
            self._forget_old()
            await asyncio.sleep(ASK_EVERY_S)

    async def _ask(self, gateway: str) -> None:
        now = asyncio.get_running_loop().time()
        if not await self._is_absent(gateway):
            self._absent_since.pop(gateway, None)
            self._gone.discard(gateway)
            return
        since = self._absent_since.setdefault(gateway, now)
        if now - since >= GONE_AFTER_S and gateway not in self._gone:
            log.info("nobody reads the replies of %s any more: its requests that ask for it are cancelled", gateway)
            self._gone.add(gateway)
            self._on_gone(gateway)

    async def _is_absent(self, gateway: str) -> bool:
        inbox, heard = self._bus.new_inbox(), list[RawMessage]()
        try:
            subscription = await self._bus.subscribe(inbox, heard.append)
            try:
                await self._bus.publish_with_reply(subjects.presence(gateway), b"", inbox)
                await self._bus.flush()
            finally:
                await subscription.unsubscribe()
        except BusError:
            return False
        return any(answer.status == NOBODY for answer in heard)

    def _forget_old(self) -> None:
        now = asyncio.get_running_loop().time()
        for gateway in [gateway for gateway, until in self._watched_until.items() if until < now]:
            del self._watched_until[gateway]
            self._absent_since.pop(gateway, None)
            self._gone.discard(gateway)
        if not self._watched_until:
            self._something.clear()
