"""The HTTP side of the gateway, around vLLM's application: ids, refusals, honest statuses, and signs of life. Plain ASGI.

vLLM's handlers answer a stream with status 200 before the request is even on the queue. Here the head of a streamed response is
held back until its first tokens are there (or a keep-alive is due), so that a failure before them is a status and a JSON
body. After that, a failure is the stream's last event, and nothing that looks like success follows it.
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from ...schemas.errors import JetwakeError
from . import exchange as exchanges
from .body import refused_field
from .exchange import EXCHANGE_KEY, Exchange, clean_client_id, metadata_in
from .failures import Failure, Shape, failure_in, failure_of, shape_of
from .gate import Gate
from .metrics import GatewayMetrics
from .resuming import ROUTE, Resuming, Wanted, first_scope, wanted_in
from .settings import GatewaySettings
from .streaming import Streaming

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

KEEP_ALIVE = b": keep-alive\n"
CLIENT_ID_HEADER = b"x-request-id"
REQUEST_ID_HEADER = b"x-jetwake-request-id"
METADATA_HEADER = b"x-jetwake-metadata"
_HIDDEN_HEADERS = frozenset({CLIENT_ID_HEADER, b"x-data-parallel-rank"})
_TRACE_HEADERS = frozenset({b"traceparent", b"tracestate"})
CLIENT_LEFT = Failure(499, "cancelled", "the client left")
_DROPPED_HEADERS = frozenset({b"content-length", CLIENT_ID_HEADER})


UPLOADS = "/v1/files"
"""Its bodies are read by whoever stores them, part by part."""


class BodyTooLarge(Exception):
    """More than `max_body_bytes`."""


class Front:
    """`routes`: the paths that are served, which are also the only ones that metrics name."""

    def __init__(
        self,
        app: App,
        settings: GatewaySettings,
        metrics: GatewayMetrics,
        routes: frozenset[str],
        gate: Gate | None = None,
        resuming: Resuming | None = None,
    ) -> None:
        self._app = app
        self._gate = gate or Gate()
        self._resuming = resuming
        self._settings = settings
        self._metrics = metrics
        self._routes = routes
        self.open_of_others = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange, scope = self._begin(scope)
        exchanges.begin(exchange)
        response = Response(send, exchange, scope["path"], self._settings.keep_alive_s)
        route = self._route(scope["path"])
        started_s = asyncio.get_running_loop().time()
        self._metrics.opened()
        is_of_others = not exchange.admitted
        self.open_of_others += is_of_others
        try:
            await self._answer(scope, receive, response)
        finally:
            response.close()
            self.open_of_others -= is_of_others
            self._metrics.closed(route, response.status, asyncio.get_running_loop().time() - started_s)
            if exchange.root is not None:
                failure = exchange.failure or (CLIENT_LEFT if response.status == CLIENT_LEFT.status else None)
                exchange.root.end({}, failure.code if failure else "", failure.text if failure else "")

    def _route(self, path: str) -> str:
        if path in self._routes:
            return path
        return ROUTE if self._resuming is not None and path.startswith(ROUTE.partition("{")[0]) else "other"

    def _begin(self, scope: Scope) -> tuple[Exchange, Scope]:
        """vLLM uses the client's id as the base of its own; it gets ours instead."""
        given = next((value for name, value in scope["headers"] if name == CLIENT_ID_HEADER), None)
        exchange: Exchange = scope.get(EXCHANGE_KEY) or Exchange()
        exchange.trace_headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"] if name in _TRACE_HEADERS
        }
        exchange.client_id = clean_client_id(given.decode("latin-1")) if given is not None else None
        headers = [(name, value) for name, value in scope["headers"] if name not in _HIDDEN_HEADERS]
        headers.append((CLIENT_ID_HEADER, exchange.request_id.encode()))
        return exchange, {**scope, "headers": headers}

    async def _answer(self, scope: Scope, receive: Receive, response: "Response") -> None:
        admitted = scope["method"] == "OPTIONS" or exchanges.current().admitted
        refusal = None if admitted else self._gate.admit(exchanges.current(), scope["headers"])
        refusal = refusal or _take_metadata(exchanges.current(), scope["headers"])
        if refusal is not None:
            self._metrics.refused(refusal.code)
            await response.fail(refusal)
            return
        try:
            wanted = wanted_in(scope) if self._resuming is not None else None
        except JetwakeError as error:
            await response.fail(failure_of(error, self._settings.retry_after_s))
            return
        if (wanted is None and scope["method"] in ("GET", "HEAD", "OPTIONS")) or scope["path"] == UPLOADS:
            await self._app(scope, receive, response.send)
            return
        try:
            body = await read_body(receive, self._settings.max_body_bytes)
        except BodyTooLarge as error:
            await response.fail(Failure(413, "payload_too_large", str(error)))
            return
        if body is None:  # the client left before it had said what it wanted
            return
        if wanted is not None:
            await self._resume(wanted, scope, receive, body, response)
            return
        refusal = refused_field(body)
        if refusal is not None:
            await response.fail(refusal)
            return
        if self._resuming is not None and EXCHANGE_KEY not in scope:
            exchanges.current().streaming = self._resuming.may_be_resumed(scope["path"], body)
        await self._app(scope, replay(body, receive), response.send)

    async def _resume(self, wanted: Wanted, scope: Scope, receive: Receive, body: bytes, response: "Response") -> None:
        assert self._resuming is not None
        exchange = exchanges.current()
        try:
            streaming = await self._resuming.found(wanted, exchange, body)
        except JetwakeError as error:
            await response.fail(failure_of(error, self._settings.retry_after_s))
            return
        exchange.request_id, exchange.streaming = wanted.request_id, streaming
        response.speak_as(streaming.path)
        first = first_scope(scope, streaming)
        headers = [(name, value) for name, value in first["headers"] if name != CLIENT_ID_HEADER]
        first["headers"] = [*headers, (CLIENT_ID_HEADER, exchange.request_id.encode())]
        await self._app(first, replay(streaming.body, receive), response.send)


class Response:
    """What goes out for one exchange. `send` takes what vLLM's application says."""

    def __init__(self, send: Send, exchange: Exchange, path: str, keep_alive_s: float) -> None:
        self.status = 499  # nothing was sent: the client left
        self._send = send
        self._exchange = exchange
        self._shape: Shape = shape_of(path)
        self._keep_alive_s = keep_alive_s
        self._start: Message | None = None
        self._streamed = False
        self._open = False
        self._ended = False
        self._held: list[Message] = []
        self._last_s = 0.0
        self._keeper: asyncio.Task[None] | None = None

    def speak_as(self, path: str) -> None:
        """The API of this path."""
        self._shape = shape_of(path)

    async def send(self, message: Message) -> None:
        if self._ended:
            return  # vLLM's closing words after a failure
        if message["type"] != "http.response.start":
            await self._body(message)
            return
        self._start = message
        content_type = next((value for name, value in message["headers"] if name == b"content-type"), b"")
        self._streamed = content_type.startswith(b"text/event-stream")
        if not self._streamed:
            if message["status"] < 400:
                await self._begin()
            elif self._exchange.failure is not None:
                await self.fail(self._exchange.failure)
        elif self._keep_alive_s:
            self._last_s = asyncio.get_running_loop().time()
            self._keeper = asyncio.create_task(self._keep_alive())

    async def fail(self, failure: Failure) -> None:
        """The whole response, or the end of the stream that has begun, is this failure."""
        self.close()
        self._ended = True
        if self._open:
            await self._send({"type": "http.response.body", "body": failure.event(self._shape), "more_body": False})
            return
        self.status = failure.status
        body = failure.body(self._shape)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *failure.headers()]
        await self._send({"type": "http.response.start", "status": failure.status, "headers": [*headers, *self._ids()]})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def close(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()

    async def _body(self, message: Message) -> None:
        if not self._streamed:
            if self._open:
                await self._send(message)
            else:  # a failure that vLLM found, in its own words: told as all the others are
                self._held.append(message)
                if not message.get("more_body", False):
                    assert self._start is not None
                    await self.fail(failure_in(self._start["status"], b"".join(part.get("body", b"") for part in self._held)))
            return
        if self._exchange.failure is not None:
            await self.fail(self._exchange.failure)
            return
        more = message.get("more_body", False)
        if self._exchange.streaming is not None and self._exchange.streaming.named:
            message = {**message, "body": self._numbered(message.get("body", b""), self._exchange.streaming)}
            if more and not message["body"]:
                return  # the client of a resumed stream has these events
        if not self._open:
            self._held.append(message)
            if more and not self._exchange.answering:
                return
            await self._begin()
        else:
            self._last_s = asyncio.get_running_loop().time()
            if not more:
                self.close()
            await self._send(message)

    def _numbered(self, events: bytes, streaming: Streaming) -> bytes:
        """The events with ids, without those that the client has."""
        request_id = self._exchange.request_id
        named = [(streaming.next_id(request_id), event) for event in events.split(b"\n\n") if event]
        return b"".join(b"id: %b\n%b\n\n" % (name.encode(), event) for name, event in named if name is not None)

    async def _begin(self) -> None:
        """Sends the head, and what was held back."""
        assert self._start is not None
        self._open = True
        self.status = self._start["status"]
        dropped = _DROPPED_HEADERS if self._streamed else frozenset({CLIENT_ID_HEADER})
        headers = [(name, value) for name, value in self._start["headers"] if name not in dropped]
        await self._send({**self._start, "headers": [*headers, *self._ids()]})
        held, self._held = self._held, []
        for message in held:
            await self._send(message)

    def _ids(self) -> Headers:
        client_id = self._exchange.client_id or self._exchange.request_id
        limits = self._exchange.grant.headers() if self._exchange.grant is not None else []
        return [(CLIENT_ID_HEADER, client_id.encode()), (REQUEST_ID_HEADER, self._exchange.request_id.encode()), *limits]

    async def _keep_alive(self) -> None:
        """One task for each stream, woken once in each interval: nothing is done for each token."""
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(self._last_s + self._keep_alive_s - clock())
            if clock() - self._last_s < self._keep_alive_s:
                continue
            if not self._open:
                await self._begin()
            self._last_s = clock()
            # Plain readers want each comment for itself. Where events have ids, OpenAI's client takes the empty line for an event.
            has_ids = self._exchange.streaming is not None and self._exchange.streaming.named
            await self._send({"type": "http.response.body", "body": KEEP_ALIVE if has_ids else KEEP_ALIVE + b"\n", "more_body": True})


def _take_metadata(exchange: Exchange, headers: Headers) -> Failure | None:
    given = next((value for name, value in headers if name == METADATA_HEADER), None)
    if given is None:
        return None
    try:
        exchange.metadata = metadata_in(given.decode("latin-1"))
    except ValueError as error:
        return Failure(400, "invalid_request", f"{METADATA_HEADER.decode()}: {error}")
    return None


async def read_body(receive: Receive, limit_bytes: int) -> bytes | None:
    """The whole body; None when the client left. Raises BodyTooLarge."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        part: bytes = message.get("body", b"")
        size += len(part)
        if size > limit_bytes:
            raise BodyTooLarge(f"the body has more than {size - 1} bytes; at most {limit_bytes} are taken")
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives a body that was read already, and then goes on with the real one."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
