"""A call of the gateway's own HTTP application from inside the process: what arrives by another way is served by the same code.

The answer comes as one document, or as the events of a stream: what a browser would see, without the frames around it.
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from ...schemas.openai_endpoints import Endpoint
from .exchange import EXCHANGE_KEY, Exchange
from .front import App, Headers

END_OF_STREAM = "[DONE]"
CLOSING_S = 5.0


@dataclass(frozen=True)
class Head:
    """Header names are in lower case."""

    status: int
    headers: dict[str, str]

    @property
    def streamed(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")


@dataclass(frozen=True)
class StreamEvent:
    """`data` empty: a sign of life."""

    kind: str
    data: str
    id: str = ""


Document = Callable[[Head, bytes], Awaitable[None]]
OnEvent = Callable[[Head, StreamEvent], Awaitable[None]]


async def call(
    app: App,
    endpoint: Endpoint,
    headers: Headers,
    body: bytes,
    exchange: Exchange,
    gone: asyncio.Event,
    document: Document,
    event: OnEvent,
) -> Head | None:
    """Its head, when the answer is complete; None when there was none. `gone`: nobody waits any more, which ends it as a closed
    connection would.
    """
    answer = _Answer(document, event, gone)
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": endpoint.method,
        "scheme": "http",
        "path": endpoint.path,
        "raw_path": endpoint.path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [*headers, (b"host", b"jetwake"), (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
        "client": None,
        "server": ("jetwake", None),
        "state": {},
        EXCHANGE_KEY: exchange,
    }
    given = False

    async def receive() -> MutableMapping[str, Any]:
        nonlocal given
        if not given:
            given = True
            return {"type": "http.request", "body": body, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    # In a task of its own: handlers start tasks that only a closed connection ends, and not a cancel that comes from outside.
    serving = asyncio.ensure_future(app(scope, receive, answer.send))
    try:
        await asyncio.shield(serving)
    except asyncio.CancelledError:
        gone.set()
        await asyncio.wait([serving], timeout=CLOSING_S)
        serving.cancel()
        raise
    return answer.head if answer.complete else None


class _Answer:
    def __init__(self, document: Document, event: OnEvent, gone: asyncio.Event) -> None:
        self.head: Head | None = None
        self.complete = False
        self._document = document
        self._event = event
        self._gone = gone
        self._parts: list[bytes] = []
        self._events = EventParser()

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in message["headers"]}
            self.head = Head(message["status"], headers)
            return
        if message["type"] != "http.response.body" or self._gone.is_set():
            return  # what is said to a connection that has closed means nothing
        assert self.head is not None
        body: bytes = message.get("body", b"")
        self.complete = not message.get("more_body", False)
        if self.head.streamed:
            for event in self._events.feed(body):
                await self._event(self.head, event)
            return
        self._parts.append(body)
        if self.complete:
            await self._document(self.head, b"".join(self._parts))


class EventParser:
    """Server-sent events out of bytes, however these were cut."""

    def __init__(self) -> None:
        self._rest = b""
        self._lines: list[str] = []

    def feed(self, data: bytes) -> list[StreamEvent]:
        """Those that are whole by now; a comment is a sign of life, an event without data."""
        *lines, self._rest = (self._rest + data).replace(b"\r\n", b"\n").split(b"\n")
        found = list[StreamEvent]()
        for line in lines:
            if line.startswith(b":"):
                found.append(StreamEvent("", ""))
            elif line:
                self._lines.append(line.decode("utf-8", "replace"))
            elif (event := _event_of(self._lines)) is not None:
                found.append(event)
            if not line:
                self._lines = []
        return found


def _event_of(lines: list[str]) -> StreamEvent | None:
    kind, event_id, data = "", "", list[str]()
    for line in lines:
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            data.append(value)
        elif name == "event":
            kind = value
        elif name == "id":
            event_id = value
    return StreamEvent(kind, "\n".join(data), event_id) if data else None
