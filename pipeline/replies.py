"""The requester's side: one subscription for all replies of a gateway, handed out to whoever waits for each request.

Reads `jw.replies.<gateway>.>` live and, when in doubt, what the broker kept: `jw.results.*`, `jw.answers.*` and stored replies.
Promises: each stream gives its tokens in order, without gap or repeat, then its one terminal, and ends; a lost message delays that
by seconds at most, because after silence, a gap or a reconnect what is kept is looked up. Of a request that nobody holds any more
(a broker lost it) the stream ends by itself, as expired, a little after its deadline.
"""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Self

from ..schemas import subjects
from ..schemas.codec import decode
from ..schemas.errors import BusError, Undecodable
from ..schemas.replies import AnyTerminal, Expired, Fence, Finished, Reply, TokenChunk
from .clock import Clock
from .connection import Bus, Subscription
from .merge import ReplyMerge, joined
from .raw import RawMessage
from .recall import kept_replies, outcome

logger = logging.getLogger(__name__)

SILENCE_S = 5.0
DEADLINE_GRACE_S = 5.0
"""How long past its deadline a request is waited for: its expiry is told by whoever holds it, if anybody does."""
GAP_S = 0.25
"""How long a later chunk may wait for an earlier one before what is kept is looked up."""
LOOKUPS_AT_ONCE = 32
_REPLY: Any = Reply  # a union, which type checkers do not take for a class

__all__ = ["SILENCE_S", "ReplyInbox", "ReplyMerge", "ReplyStream"]


class ReplyStream:
    """The merged replies of one request: `async for reply in stream`. It ends after the terminal, or after `close`."""

    def __init__(
        self, inbox: "ReplyInbox", gateway: str, request_id: str, model: str, *, wait_s: float = math.inf, from_kept: bool = False
    ) -> None:
        """`wait_s`: how long an end is waited for. `from_kept`: begin with what is kept of the answer, for a reader that comes later."""
        self.gateway = gateway
        self.request_id = request_id
        self.model = model
        self.on_close: Callable[[], None] = lambda: None
        self._inbox = inbox
        self._merge = ReplyMerge()
        self._ready: deque[TokenChunk | AnyTerminal] = deque()
        self._news = asyncio.Event()
        self._until_s = asyncio.get_running_loop().time() + wait_s
        self._from_kept = self._in_doubt = from_kept
        self._closed = False

    def close(self) -> None:
        """Hear no more. Safe to call twice."""
        self._closed = True
        self._news.set()
        self._inbox.forget(self)
        self.on_close()

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
                if not self._ready and self._left_s() <= 0:
                    self.feed(Expired(request_id=self.request_id, model=self.model, attempt=1, phase="no ending was heard by its deadline"))
            else:
                await self._wait_for_news()
        return self._take()

    @property
    def end_is_next(self) -> bool:
        """The next reply is the end for the answer's length, and it is there already."""
        return bool(self._ready) and isinstance(end := self._ready[0], Finished) and end.finish_reason == "length"

    def _take(self) -> TokenChunk | AnyTerminal:
        """What came while the reader was busy comes at once, and costs it one turn."""
        reply = self._ready.popleft()
        while isinstance(reply, TokenChunk) and self._ready and isinstance(following := self._ready[0], TokenChunk):
            both = joined(reply, following)
            if both is None:
                break
            self._ready.popleft()
            reply = both
        return reply

    def _left_s(self) -> float:
        return self._until_s - asyncio.get_running_loop().time()

    async def _wait_for_news(self) -> None:
        self._news.clear()
        try:
            async with asyncio.timeout(min(GAP_S if self._merge.has_gap else SILENCE_S, self._left_s())):
                await self._news.wait()
        except TimeoutError:
            self._in_doubt = True

    async def _look_up(self) -> None:
        try:
            ending = await self._inbox.outcome(self.model, self.gateway, self.request_id)
            kept: list[TokenChunk | AnyTerminal] = []
            if ending is None or isinstance(ending, Fence):
                attempt = ending.attempt if isinstance(ending, Fence) else 1
                kept = await self._inbox.kept(self, attempt, with_chunks=self._from_kept or self._merge.has_gap)
            if kept:  # once more: where no fence stands now, nothing kept can be from behind one
                ending = await self._inbox.outcome(self.model, self.gateway, self.request_id)
        except (BusError, Undecodable) as error:
            logger.warning("what is kept of %s was not read, waiting on: %s", self.request_id, error)
            return
        self._from_kept = False
        if isinstance(ending, Fence):
            self.feed(TokenChunk(request_id=self.request_id, attempt=ending.attempt, offset=0, tokens=b""))
        for reply in kept:
            self.feed(reply)
        if ending is not None and not isinstance(ending, Fence):
            self.feed(ending)


class ReplyInbox:
    """One for each gateway name. `start` before the first request is sent.

    `shared`: several processes read under this name, so each hears only of the requests that it waits for (`open_shared`).
    """

    def __init__(self, bus: Bus, gateway: str, clock: Clock, *, shared: bool = False) -> None:
        self.gateway = gateway
        self._shared = shared
        self._bus = bus
        self._clock = clock
        self._streams: dict[str, set[ReplyStream]] = {}
        self._lookups = asyncio.Semaphore(LOOKUPS_AT_ONCE)
        self._background: set[asyncio.Task[None]] = set()
        self._subscription: Subscription | None = None
        self._presence: Subscription | None = None
        self._forget_reconnects: Callable[[], None] | None = None

    async def start(self) -> None:
        """Listening on return: a reply sent from now on is heard."""
        if not self._shared:
            self._subscription = await self._bus.subscribe(subjects.replies_of(self.gateway), self._receive)
            self._presence = await self._bus.subscribe(subjects.presence(self.gateway), lambda _: None)  # being there is the answer
            await self._bus.flush()
        self._forget_reconnects = self._bus.on_reconnect(self._doubt_all)

    async def close(self) -> None:
        """Ends every open stream. Safe to call twice."""
        if self._forget_reconnects is not None:
            self._forget_reconnects()
            self._forget_reconnects = None
        for subscription in (self._subscription, self._presence):
            if subscription is not None:
                await subscription.unsubscribe()
        for stream in [stream for streams in self._streams.values() for stream in streams]:
            stream.close()
        while self._background:
            await asyncio.wait(self._background)

    def open(self, request_id: str, model: str, deadline_ns: int = 0) -> ReplyStream:
        """To be called before the request is sent. `deadline_ns`: in server time; 0: none."""
        return self._add(ReplyStream(self, self.gateway, request_id, model, wait_s=self._wait_s(deadline_ns)))

    async def open_shared(self, request_id: str, model: str, deadline_ns: int = 0) -> ReplyStream:
        """As `open`, under a shared name. Raises BusError."""
        stream = self._add(ReplyStream(self, self.gateway, request_id, model, wait_s=self._wait_s(deadline_ns)))
        await self._listen(stream, subjects.reply(self.gateway, request_id))
        return stream

    async def resume(
        self, gateway: str, request_id: str, model: str, deadline_ns: int = 0, *, in_place_of_gateway: bool = False
    ) -> ReplyStream:
        """All replies of a request that was sent before, by whomever: what is kept of them first, then what comes. Raises BusError.

        `in_place_of_gateway`: for as long as this is read, requests of that gateway do not count as unread.
        """
        stream = self._add(ReplyStream(self, gateway, request_id, model, wait_s=self._wait_s(deadline_ns), from_kept=True))
        if gateway != self.gateway or self._shared:
            own = (subjects.reply(gateway, request_id),)
            await self._listen(stream, *own, *((subjects.presence(gateway),) if in_place_of_gateway else ()))
        return stream

    async def _listen(self, stream: ReplyStream, *wanted: str) -> None:
        """To these subjects, for as long as this stream is read."""
        subscriptions: list[Subscription] = []

        def leave() -> None:
            for subscription in subscriptions:
                self._in_background(subscription.unsubscribe())

        stream.on_close = leave
        try:
            for subject in wanted:
                subscriptions.append(await self._bus.subscribe(subject, self._receive))  # noqa: PERF401  (what is there when one fails is left)
            await self._bus.flush()
        except BusError:
            stream.close()
            raise

    def _wait_s(self, deadline_ns: int) -> float:
        return (deadline_ns - self._clock.now_ns()) / 1e9 + DEADLINE_GRACE_S if deadline_ns else math.inf

    def _add(self, stream: ReplyStream) -> ReplyStream:
        self._streams.setdefault(subjects.reply(stream.gateway, stream.request_id), set()).add(stream)
        return stream

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def forget(self, stream: ReplyStream) -> None:
        subject = subjects.reply(stream.gateway, stream.request_id)
        streams = self._streams.get(subject)
        if streams is not None:
            streams.discard(stream)
            if not streams:
                del self._streams[subject]

    async def lookup(self, model: str, gateway: str, request_id: str) -> AnyTerminal | None:
        """The stored terminal, or None while there is none. Raises BusError."""
        ending = await self.outcome(model, gateway, request_id)
        return None if isinstance(ending, Fence) else ending

    async def outcome(self, model: str, gateway: str, request_id: str) -> AnyTerminal | Fence | None:
        """The stored terminal, or the fence of the attempt that goes on, or None. Raises BusError."""
        async with self._lookups:
            return await outcome(self._bus, model, gateway, request_id)

    async def kept(self, stream: ReplyStream, attempt: int, *, with_chunks: bool) -> list[TokenChunk | AnyTerminal]:
        """What the broker kept of a stream's replies. Raises BusError."""
        async with self._lookups:
            return await kept_replies(self._bus, stream.gateway, stream.request_id, attempt, with_chunks=with_chunks)

    def _receive(self, message: RawMessage) -> None:
        streams = self._streams.get(message.subject)
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
