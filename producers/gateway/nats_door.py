"""The OpenAI API on subjects: a request arrives as JSON with a reply subject, and is served by the same application as over HTTP.

Reads `jw.openai.<endpoint>` as one of the queue group of all gateways, and `jw.openai-of.<model>.<endpoint>`, where others pass on
what is for the models served here. Writes to reply subjects: one message, or one for each event of a stream. The last one says so.
Promises: every request that is taken gets an answer, also while this gateway stops; a request that is cancelled on
`jw.cancel.<id>` ends here and at the workers. Whether a reader is still there cannot be known: deadlines bound what that costs.
"""

import asyncio
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from ...pipeline.connection import Bus, RawMessage, Subscription
from ...schemas import subjects
from ...schemas.errors import BrokerUnavailable, BusError, PayloadTooLarge, StreamMissing
from ...schemas.openai_endpoints import ENDPOINTS, Endpoint
from .exchange import Exchange, metadata_in
from .failures import Failure, Shape, shape_of
from .front import CLIENT_ID_HEADER, REQUEST_ID_HEADER, App, Headers
from .in_process import END_OF_STREAM, Head, StreamEvent, call

logger = logging.getLogger(__name__)

PRESENT = "present"
"""Instead of an endpoint: asks whether a gateway of this model is there."""
_HEADERS_TAKEN = frozenset({"authorization", "x-api-key", "x-request-id", "traceparent", "tracestate", "anthropic-version"})
_REQUEST_ID = REQUEST_ID_HEADER.decode()
_TIMEOUT = re.compile(r"\d{1,6}(\.\d{1,3})?")


@dataclass
class _Running:
    """`gone` ends it as a closed connection would."""

    exchange: Exchange
    gone: asyncio.Event = field(default_factory=asyncio.Event)


class NatsDoor:
    """`names`: those of the models served here. `slots`: how many requests may be in work at the same time."""

    def __init__(self, bus: Bus, app: App, names: Sequence[str], slots: int) -> None:
        self._bus = bus
        self._app = app
        self._names = frozenset(names)
        self._slots = slots
        self._subscriptions: list[Subscription] = []
        self._running: dict[str, _Running] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Requests are taken from now on."""
        for endpoint in ENDPOINTS.values():
            await self._listen(subjects.openai(endpoint.name), subjects.OPENAI_GROUP, endpoint)
        for name in self._names:
            for endpoint in ENDPOINTS.values():
                await self._listen(subjects.openai_of(name, endpoint.name), subjects.openai_group_of(name), endpoint)
            self._subscriptions.append(await self._bus.subscribe(subjects.openai_of(name, PRESENT), self._say_present))
        self._subscriptions.append(await self._bus.subscribe(subjects.CANCELS, self._on_cancel))
        await self._bus.flush()

    async def stop(self, grace_s: float) -> None:
        """Takes no more, and lets what it has end; what has not within `grace_s` is ended, and told so."""
        for subscription in self._subscriptions:
            await subscription.drain(self._bus.settings.request_timeout_s)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace_s)
        for running in self._running.values():
            running.exchange.failure = Failure(503, BrokerUnavailable.code, "this gateway stops: ask again", retry_after_s=1.0)
            running.gone.set()
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _listen(self, subject: str, group: str, endpoint: Endpoint) -> None:
        passed_on = not subject.startswith(subjects.openai(""))
        self._subscriptions.append(
            await self._bus.subscribe(subject, lambda message: self._take(message, endpoint, passed_on), queue=group)
        )

    # ------------------------------------------------------------------------------------------------------ one request

    def _take(self, message: RawMessage, endpoint: Endpoint, passed_on: bool) -> None:
        if not message.reply:
            logger.info("a request on %s names no reply subject, so nobody can hear an answer: left alone", message.subject)
            return
        if problem := subjects.reply_subject_problem(message.reply):
            logger.warning("a request on %s is left alone: %s; it named %s", message.subject, problem, message.reply)
            return
        task = asyncio.create_task(self._answer(message, endpoint, passed_on))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, message: RawMessage, endpoint: Endpoint, passed_on: bool) -> None:
        reply = _Reply(self._bus, message.reply, endpoint)
        try:
            if len(self._running) >= self._slots:
                await reply.fail(Failure(429, "overloaded", f"{self._slots} requests are in work here: try again", retry_after_s=1.0))
            elif passed_on or not await self._pass_on(message, endpoint):
                await self._serve(message, endpoint, reply)
        except BusError as error:  # the reader asks again, or has its deadline
            logger.warning("a request on %s lost its way to the reader: %s", message.subject, error)

    async def _serve(self, message: RawMessage, endpoint: Endpoint, reply: "_Reply") -> None:
        headers = {name.lower(): value for name, value in message.headers.items()}
        try:
            exchange = Exchange(timeout_s=timeout_in(headers), metadata=metadata_in(headers.get(subjects.METADATA_HEADER.lower())))
        except ValueError as error:
            await reply.fail(Failure(400, "invalid_request", str(error)))
            return
        running = self._running[exchange.request_id] = _Running(exchange)
        reply.request_id = exchange.request_id
        try:
            body = message.data if endpoint.method == "POST" else b""
            head = await call(self._app, endpoint, http_headers(headers), body, exchange, running.gone, reply.document, reply.event)
            if head is None:  # ended in mid-answer, and the application thinks that nobody listens
                await reply.fail(exchange.failure or Failure(409, "cancelled", f"{exchange.request_id} was cancelled"))
            elif head.streamed:
                await reply.end()
        finally:
            del self._running[exchange.request_id]

    async def _pass_on(self, message: RawMessage, endpoint: Endpoint) -> bool:
        """To the gateways of the model it is for, if that is none of ours and they are there."""
        model = model_in(message.data)
        if model is None or model in self._names or endpoint.method != "POST" or not await is_served(self._bus, model):
            return False
        subject = subjects.openai_of(model, endpoint.name)
        await self._bus.publish_with_reply(subject, message.data, message.reply, message.headers)
        return True

    def _say_present(self, message: RawMessage) -> None:
        if message.reply:
            task: asyncio.Task[None] = asyncio.create_task(self._bus.publish(message.reply, b""))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _on_cancel(self, message: RawMessage) -> None:
        running = self._running.get(subjects.last_token(message.subject))
        if running is not None and not message.data:  # what has a body is said among ourselves
            running.gone.set()


class _Reply:
    """What goes to one reply subject."""

    def __init__(self, bus: Bus, subject: str, endpoint: Endpoint) -> None:
        self.request_id = ""
        self._bus = bus
        self._subject = subject
        self._shape: Shape = shape_of(endpoint.path)
        self._begun = False
        self._ended = False

    async def document(self, head: Head, body: bytes) -> None:
        self._ended = True
        await self._send(body, reply_headers(head) | {subjects.END_HEADER: "done" if head.status < 400 else "error"})

    async def event(self, head: Head, event: StreamEvent) -> None:
        if event.data == END_OF_STREAM:
            await self.end()
            return
        headers = {} if self._begun else reply_headers(head)
        if not event.data:
            headers[subjects.KEEP_ALIVE_HEADER] = "1"
        if event.kind:
            headers[subjects.EVENT_HEADER] = event.kind
        self._begun = True
        if event.kind == "error":
            self._ended = True
            headers[subjects.END_HEADER] = "error"
        await self._send(event.data.encode(), headers)

    async def end(self, how: str = "done") -> None:
        if not self._ended:
            self._ended = True
            await self._send(b"", {subjects.END_HEADER: how})

    async def fail(self, failure: Failure) -> None:
        """As the whole answer, or as the end of a stream that has begun."""
        if self._ended:
            return
        headers = {subjects.STATUS_HEADER: str(failure.status), subjects.CONTENT_TYPE_HEADER: "application/json"}
        if failure.retry_after_s is not None:
            headers["Retry-After"] = dict(failure.headers())[b"retry-after"].decode()
        if self.request_id:
            headers[subjects.REQUEST_HEADER] = self.request_id
        if self._begun:
            headers[subjects.EVENT_HEADER] = "error"
        self._ended = True
        await self._send(failure.body(self._shape), headers | {subjects.END_HEADER: "error"})

    async def _send(self, payload: bytes, headers: Mapping[str, str]) -> None:
        try:
            await self._bus.publish(self._subject, payload, headers)
        except PayloadTooLarge as error:
            # Nothing after this is of use to the reader: what it has is not whole.
            self._ended = True
            body = Failure(413, error.code, f"the answer does not fit into a message: {error}").body(self._shape)
            await self._bus.publish(self._subject, body, {subjects.STATUS_HEADER: "413", subjects.END_HEADER: "error"})


async def is_served(bus: Bus, model: str) -> bool:
    """Whether a gateway of this model is there."""
    try:
        await bus.request(subjects.openai_of(model, PRESENT), b"")
    except StreamMissing:
        return False
    except BrokerUnavailable:  # one that is too busy to say so
        return True
    return True


def model_in(body: bytes) -> str | None:
    """The model a body names; None when it names none, or is no JSON object: the application says what is wrong with it."""
    try:
        fields: Any = json.loads(body)
    except ValueError:
        return None
    name = cast(dict[str, Any], fields).get("model") if isinstance(fields, dict) else None
    return name if isinstance(name, str) and name else None


def http_headers(headers: Mapping[str, str]) -> Headers:
    """Those of a message that mean something to the application. `headers` has names in lower case."""
    return [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items() if name in _HEADERS_TAKEN]


def timeout_in(headers: Mapping[str, str]) -> float | None:
    """Raises ValueError."""
    given = headers.get(subjects.TIMEOUT_HEADER.lower())
    if given is None:
        return None
    if _TIMEOUT.fullmatch(given) is None or float(given) <= 0:
        raise ValueError(f"{subjects.TIMEOUT_HEADER} must be a number of seconds above 0 and below 1000000, not {given[:40]!r}")
    return float(given)


def reply_headers(head: Head) -> dict[str, str]:
    """Of the first message of an answer."""
    headers = {subjects.STATUS_HEADER: str(head.status), subjects.CONTENT_TYPE_HEADER: "application/json"}
    for name, value in head.headers.items():
        if name == _REQUEST_ID:
            headers[subjects.REQUEST_HEADER] = value
        elif name == CLIENT_ID_HEADER.decode():
            headers["X-Request-Id"] = value
        elif name == "retry-after":
            headers["Retry-After"] = value
        elif name.startswith("x-ratelimit-"):
            headers[name.title()] = value
    return headers
