"""The requester's side: one subscription for all replies of a gateway, handed out to whoever waits for each request.

Reads `jw.replies.<gateway>.>` live and `jw.results.*` when in doubt. Promises: each stream gives its tokens in order, without
gap or repeat, then its one terminal, and ends; a lost message delays that by seconds at most, because after silence or a
reconnect the stored terminal is looked up.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Self

from ..schemas import subjects
from ..schemas.codec import decode
from ..schemas.errors import BusError, Undecodable
from ..schemas.replies import AnyTerminal, Reply, TokenChunk
from ..schemas.streams import RESULTS
from .connection import Bus, Subscription
from .jetstream import last_message
from .merge import ReplyMerge
from .raw import RawMessage

logger = logging.getLogger(__name__)

SILENCE_S = 5.0
LOOKUPS_AT_ONCE = 32
_REPLY: Any = Reply  # unions, which type checkers do not take for classes
_TERMINAL: Any = AnyTerminal

__all__ = ["SILENCE_S", "ReplyInbox", "ReplyMerge", "ReplyStream"]


class ReplyStream:
    """The merged replies of one request: `async for reply in stream`. It ends after the terminal, or after `close`."""

    def __init__(self, inbox: "ReplyInbox", request_id: str, model: str, start_tokens: int) -> None:
        self.request_id = request_id
        self.model = model
        self._inbox = inbox
        self._merge = ReplyMerge(start_tokens)
        self._ready: deque[TokenChunk | AnyTerminal] = deque()
        self._news = asyncio.Event()
        self._in_doubt = False
        self._closed = False

    def close(self) -> None:
        """Hear no more. Safe to call twice."""
        self._closed = True
        self._news.set()
        self._inbox.forget(self)

    def look_up_soon(self) -> None:
        """Something may have been missed: the waiter asks for the stored terminal."""
        self._in_doubt = True
        self._news.set()

    def feed(self, reply: TokenChunk | AnyTerminal) -> None:
        self._ready.extend(self._merge.feed(reply))
        self._news.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenChunk | AnyTerminal:
        while not self._ready:
            if self._closed or self._merge.ended:
                self.close()
                raise StopAsyncIteration
            if self._in_doubt:
                self._in_doubt = False
                await self._look_up()
            else:
                await self._wait_for_news()
        return self._ready.popleft()

    async def _wait_for_news(self) -> None:
        self._news.clear()
        try:
            async with asyncio.timeout(SILENCE_S):
                await self._news.wait()
        except TimeoutError:
            self._in_doubt = True

    async def _look_up(self) -> None:
        try:
            terminal = await self._inbox.lookup(self.model, self._inbox.gateway, self.request_id)
        except (BusError, Undecodable) as error:
            logger.warning("the stored end of %s was not read, waiting on: %s", self.request_id, error)
            return
        if terminal is not None:
            self.feed(terminal)


class ReplyInbox:
    """One for each gateway name. `start` before the first request is sent."""

    def __init__(self, bus: Bus, gateway: str) -> None:
        self.gateway = gateway
        self._bus = bus
        self._streams: dict[str, set[ReplyStream]] = {}
        self._lookups = asyncio.Semaphore(LOOKUPS_AT_ONCE)
        self._subscription: Subscription | None = None
        self._forget_reconnects: Callable[[], None] | None = None

    async def start(self) -> None:
        """Listening on return: a reply sent from now on is heard."""
        self._subscription = await self._bus.subscribe(subjects.replies_of(self.gateway), self._receive)
        await self._bus.flush()
        self._forget_reconnects = self._bus.on_reconnect(self._doubt_all)

    async def close(self) -> None:
        """Ends every open stream. Safe to call twice."""
        if self._forget_reconnects is not None:
            self._forget_reconnects()
            self._forget_reconnects = None
        if self._subscription is not None:
            await self._subscription.unsubscribe()
        for stream in [stream for streams in self._streams.values() for stream in streams]:
            stream.close()

    def open(self, request_id: str, model: str, start_tokens: int = 0) -> ReplyStream:
        """To be called before the request is sent. `start_tokens`: what a resuming reader has already."""
        stream = ReplyStream(self, request_id, model, start_tokens)
        self._streams.setdefault(request_id, set()).add(stream)
        return stream

    def forget(self, stream: ReplyStream) -> None:
        streams = self._streams.get(stream.request_id)
        if streams is not None:
            streams.discard(stream)
            if not streams:
                del self._streams[stream.request_id]

    async def lookup(self, model: str, gateway: str, request_id: str) -> AnyTerminal | None:
        """The stored terminal, or None while there is none. Raises BusError."""
        async with self._lookups:
            message = await last_message(self._bus, RESULTS.name, subjects.result(model, gateway, request_id))
        terminal: AnyTerminal | None = decode(message.data, _TERMINAL) if message is not None else None
        return terminal

    def _receive(self, message: RawMessage) -> None:
        streams = self._streams.get(subjects.last_token(message.subject))
        if not streams:
            return
        try:
            reply: TokenChunk | AnyTerminal = decode(message.data, _REPLY)
        except Undecodable as error:
            logger.warning("a reply on %s cannot be read: %s", message.subject, error)
            for stream in streams:
                stream.look_up_soon()
            return
        for stream in tuple(streams):
            stream.feed(reply)

    async def _doubt_all(self) -> None:
        for streams in self._streams.values():
            for stream in streams:
                stream.look_up_soon()
