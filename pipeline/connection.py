"""One connection to the broker that reconnects for ever: publish, request, subscribe.

Reads and writes the network through nats-py, and is the only module that holds its client. Promises: no exception of nats-py
leaves it; a payload the broker would cut us off for is refused before it is sent; every wait for an answer ends; what must be
done again after a reconnect is done again until it succeeds; `failed()` tells when the connection is lost for good; what the broker's
permissions forbid is an error that names the subject.
"""

import asyncio
import logging
import re
import ssl
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager

from ..schemas.errors import BrokerUnavailable, JetwakeError, NotPermitted, PayloadTooLarge, SetupError, StreamMissing
from .faults import FOREIGN_ERRORS, translated, translation
from .hearing_client import HearingClient, keeping_cancels
from .inbox import AnswerInbox
from .raw import RawMessage
from .reconnects import ReconnectCallback, Reconnects
from .refusals import FORBIDDEN, Refusals, not_permitted
from .settings import BrokerSettings
from .subscription import Subscription
from .user_keys import check_seed_file

__all__ = ["Bus", "RawMessage", "Subscription", "encoded_headers_bytes"]

logger = logging.getLogger(__name__)

Callback = Callable[[RawMessage], None]

_VIOLATION = re.compile(r'permissions violation for (publish|subscription) to "([^"]*)"')
_PUBLISH_BUFFER_BYTES = 8 << 20


class Bus:
    """Made by `Bus.connect` (a context manager) or `Bus.open` and `close`."""

    def __init__(self, settings: BrokerSettings, name: str) -> None:
        self.settings = settings
        self.name = name
        self._client = HearingClient()
        self._connected = asyncio.Event()
        self._reconnects = Reconnects()
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._closing = False
        self._last_error = "no error told"
        self._turned_away = False
        self._tls_error = ""
        self._hopeless: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._where = re.sub(r"//[^/@,]*@", "//", settings.url)  # passwords do not belong in error texts
        self._inbox = AnswerInbox("")
        self.refusals = Refusals()
        self._supervisor: asyncio.Task[None] | None = None

    # -- life -------------------------------------------------------------------------------------------------------

    @classmethod
    @asynccontextmanager
    async def connect(cls, settings: BrokerSettings, name: str) -> "AsyncGenerator[Bus]":
        bus = await cls.open(settings, name)
        try:
            yield bus
        finally:
            await bus.close()

    @classmethod
    async def open(cls, settings: BrokerSettings, name: str) -> "Bus":
        """Connected, or BrokerUnavailable after `connect_timeout_s`, or NotPermitted when the broker turned us away."""
        bus = cls(settings, name)
        connecting = asyncio.create_task(bus._connect())
        try:
            await asyncio.wait({connecting, bus._hopeless}, timeout=settings.connect_timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not connecting.done():
                raise bus._not_connected()
            with translation(f"connecting to {bus._where}"):
                connecting.result()
        except BaseException:
            await _ended(connecting)
            await bus.close()
            raise
        bus._supervisor = asyncio.create_task(bus._reconnects.run(), name="bus-supervisor")
        return bus

    def _not_connected(self) -> JetwakeError:
        """Why not, as far as was heard."""
        if self._tls_error:
            return SetupError(f"no TLS with {self._where}: {self._tls_error}; see --nats-tls-ca, --nats-tls-cert and --nats-tls-key")
        if self._turned_away:
            return NotPermitted(f"{self._where} refused us: wrong or missing credentials")
        return BrokerUnavailable(
            f"no NATS server answers at {self._where} within {self.settings.connect_timeout_s:g} s ({self._last_error})"
        )

    async def _connect(self) -> None:
        settings = self.settings
        credentials, nkey = settings.credentials, settings.nkey_file
        if credentials is not None and not credentials.is_file():
            raise SetupError(f"credentials file {credentials} does not exist")
        if nkey is not None:
            check_seed_file(nkey)
        await self._client.connect(
            servers=settings.url.split(","),
            name=self.name,
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnected,
            reconnected_cb=self._on_reconnected,
            closed_cb=self._on_closed,
            max_reconnect_attempts=-1,
            reconnect_time_wait=settings.reconnect_wait_s,  # pyright: ignore[reportArgumentType]  (typed int, used as float)
            connect_timeout=2,
            ping_interval=settings.ping_interval_s,  # pyright: ignore[reportArgumentType]
            max_outstanding_pings=2,
            flush_timeout=settings.request_timeout_s,
            pending_size=_PUBLISH_BUFFER_BYTES,
            inbox_prefix=settings.inbox_prefix,
            user_credentials=str(credentials) if credentials is not None else None,
            nkeys_seed=str(nkey) if nkey is not None else None,
            tls=_tls_context(settings),
        )
        self._connected.set()
        self._inbox = AnswerInbox(self._client.new_inbox())
        await self.subscribe(self._inbox.subject, self._inbox.deliver)

    async def close(self) -> None:
        """Send what is buffered, then leave. Safe to call twice and after a failed start."""
        self._closing = True
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait([self._supervisor])
        try:
            async with asyncio.timeout(self.settings.request_timeout_s):
                if self.connected:
                    await self._client.flush()
        except FOREIGN_ERRORS as error:
            logger.debug("what is still to be sent is given up: %s", error)
            self._client.abandon()
        try:
            async with asyncio.timeout(self.settings.request_timeout_s):
                await self._client.close()
        except (*FOREIGN_ERRORS, AssertionError) as error:  # nats-py asserts when it never connected
            logger.debug("closing the connection: %s", error)
            self._client.abandon()
        self._inbox.fail_all(BrokerUnavailable("the connection was closed"))

    @property
    def connected(self) -> bool:
        return self._client.is_connected and self._connected.is_set()

    @property
    def max_payload_bytes(self) -> int:
        """For payload and encoded headers together."""
        return self._client.max_payload

    @property
    def server_version(self) -> tuple[int, int, int]:
        """As the server it is connected to tells."""
        told = self._client.connected_server_version
        return told.major, told.minor, told.patch

    @property
    def missing_grace_s(self) -> float:
        """How long a stream or consumer that nobody answers for may be there all the same: not loaded yet, or without a leader."""
        return self.settings.election_grace_s if self._client.is_clustered else self.settings.missing_grace_s

    @property
    def is_clustered(self) -> bool:
        return self._client.is_clustered

    def new_inbox(self) -> str:
        return self._client.new_inbox()

    async def wait_connected(self) -> None:
        await self._connected.wait()

    async def failed(self) -> None:
        """Waits until the connection is gone for good, then raises BrokerUnavailable. Roles run it beside their work."""
        waits: list[asyncio.Future[None]] = [self._closed]
        if self._supervisor is not None:
            waits.append(self._supervisor)
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if self._supervisor is not None and self._supervisor.done() and not self._supervisor.cancelled():
            self._supervisor.result()  # a bug in a reconnect callback: it ends the process as what it is
        raise BrokerUnavailable(f"the connection to {self._where} is closed for good: {self._last_error}")

    # -- sending ----------------------------------------------------------------------------------------------------

    async def publish(self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Plain publish: no answer, and lost when the connection breaks now. Buffered while reconnecting."""
        self.check_size(subject, payload, headers)
        await self._send(subject, payload, headers, "")

    async def publish_with_reply(self, subject: str, payload: bytes, reply: str, headers: Mapping[str, str] | None = None) -> None:
        """Plain publish that tells where answers go. They arrive at the caller's own subscription."""
        self.check_size(subject, payload, headers)
        await self._send(subject, payload, headers, reply)

    async def request(
        self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None, timeout_s: float | None = None
    ) -> RawMessage:
        """The one answer. BrokerUnavailable: none in time, outcome unknown. StreamMissing: nobody listens there."""
        return await self.request_many(subject, payload, lambda _: False, headers, timeout_s)

    async def request_many(
        self,
        subject: str,
        payload: bytes,
        take: Callable[[RawMessage], bool],
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> RawMessage:
        """As `request`, for a question with many answers: the first one of which `take` says that no more come."""
        self.check_size(subject, payload, headers)
        timeout_s = self.settings.request_timeout_s if timeout_s is None else timeout_s
        reply, answer = self._inbox.ask(subject, take)
        try:
            async with asyncio.timeout(timeout_s):
                if not self.connected:
                    await self._connected.wait()
                self.refusals.check_subscription(self._inbox.subject)
                await self._send(subject, payload, headers, reply)
                message = await answer
        except TimeoutError as error:
            raise BrokerUnavailable(f"no answer on {subject} within {timeout_s:g} s") from error
        finally:
            self._inbox.forget(reply)
        if message.status == "503" and not message.data:
            raise StreamMissing(f"nobody answers on {subject}: no stream, consumer or service is there")
        return message

    def check_size(self, subject: str, payload: bytes, headers: Mapping[str, str] | None) -> None:
        """The broker cuts a connection that sends too much, for good; so nothing too large is ever sent."""
        size = len(payload) + encoded_headers_bytes(headers)
        if size > self.max_payload_bytes:
            raise PayloadTooLarge(f"message for {subject} has {size} bytes, the broker carries {self.max_payload_bytes}")

    async def _send(self, subject: str, payload: bytes, headers: Mapping[str, str] | None, reply: str) -> None:
        self.refusals.check_publish(subject)
        with keeping_cancels():
            try:
                await self._client.publish(subject, payload, reply, dict(headers) if headers else None)
            except FOREIGN_ERRORS as error:
                raise translated(error, f"publishing to {subject}") from error

    # -- receiving --------------------------------------------------------------------------------------------------

    async def subscribe(self, subject: str, callback: Callback, queue: str = "") -> Subscription:
        """`callback` runs in the loop, in order; when it raises, that is logged and the next message comes."""

        self.refusals.subscribing(subject)
        with translation(f"subscribing to {subject}"):
            subscribed = await self._client.listen(subject, queue, callback)
            return Subscription(subscribed, lambda: self.refusals.left(subject))

    async def publish_permitted(self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Plain publish that the broker has seen on return. Raises NotPermitted when it was refused."""
        await self.publish(subject, payload, headers)
        await self.flush()
        self.refusals.check_publish(subject)

    async def flush(self) -> None:
        """The broker has seen all that was sent before. Raises NotPermitted while any subscription of this connection is refused."""
        if not self.connected:
            raise BrokerUnavailable(f"not connected to {self._where}")
        with keeping_cancels(), translation(f"flushing: {self._where} did not answer"):
            async with asyncio.timeout(self.settings.request_timeout_s):
                await self._client.flush()
        self.refusals.check_subscriptions()

    # -- what nats-py tells -------------------------------------------------------------------------------------------

    def on_reconnect(self, callback: ReconnectCallback) -> Callable[[], None]:
        """Run after every reconnect, in order of registration, again while it raises a JetwakeError. Returns its removal."""
        return self._reconnects.add(callback)

    async def _on_error(self, error: Exception) -> None:
        self._last_error = str(error) or type(error).__name__
        # Remembered, because the next try may end in a reset before the broker's words are read.
        self._turned_away |= "authorization violation" in self._last_error.lower()
        if isinstance(error, ssl.SSLError) and _is_about_certificates(error):
            self._tls_error = self._last_error
            if "," not in self.settings.url and not self._hopeless.done():
                self._hopeless.set_result(None)
        violation = _VIOLATION.search(self._last_error.lower())
        if violation is not None:
            self._on_violation(violation[1], violation[2])
        elif isinstance(error, FOREIGN_ERRORS):
            # While the broker is away, four of these come each second; that it is away was said once already.
            logger.log(logging.DEBUG if isinstance(error, OSError) else logging.INFO, "%s: %s", self.name, self._last_error)
        else:
            logger.error("%s: a callback failed", self.name, exc_info=error)

    def _on_violation(self, verb: str, subject_lowercase: str) -> None:
        logger.error("%s: %s %s to %s", self.name, FORBIDDEN, verb, subject_lowercase)
        if verb == "publish":
            self.refusals.publish_refused(subject_lowercase)
            self._inbox.fail_asked_on(subject_lowercase, lambda subject: not_permitted(verb, subject))
            return
        self.refusals.subscription_refused(subject_lowercase)
        if subject_lowercase == self._inbox.subject.lower():
            logger.error("%s: no answers can be heard: this user has another inbox prefix than %s", self.name, self.settings.inbox_prefix)
            self._inbox.fail_all(not_permitted(verb, self._inbox.subject))

    async def _on_disconnected(self) -> None:
        if not self._closing:
            logger.warning("%s: lost the connection to the broker", self.name)
        self._connected.clear()
        self.refusals.forget()
        self._inbox.fail_all(BrokerUnavailable("the connection was lost before the answer came"))

    async def _on_reconnected(self) -> None:
        logger.info("%s: connected again", self.name)
        self._connected.set()
        self._reconnects.happened()

    async def _on_closed(self) -> None:
        self._connected.clear()
        if not self._closed.done():
            self._closed.set_result(None)


def encoded_headers_bytes(headers: Mapping[str, str] | None) -> int:
    """Bytes of the header block as sent: a version line, one line each, an empty line."""
    if not headers:
        return 0
    return 12 + sum(len(name.encode()) + len(value.encode()) + 4 for name, value in headers.items())


async def _ended(task: asyncio.Task[None]) -> None:
    """Cancelled until it is: nats-py's first connection goes on for ever, and a cancel that meets it while it closes a socket is lost."""
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=0.1)
    if not task.cancelled():
        task.exception()  # told already


def _is_about_certificates(error: ssl.SSLError) -> bool:
    """One of the two ends does not accept the other's, and will not the next time either."""
    return "CERTIFICATE" in (error.reason or "") or "UNKNOWN_CA" in (error.reason or "")


class _WithoutRemark(logging.Filter):
    """nats-py turns a plain connection into one over TLS, and asyncio remarks on that at the end of each. It means nothing."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "eof_received() has no effect when using ssl" not in record.getMessage()


_WITHOUT_REMARK = _WithoutRemark()


def _tls_context(settings: BrokerSettings) -> ssl.SSLContext | None:
    if settings.tls_ca is None and settings.tls_cert is None:
        return None
    logging.getLogger("asyncio").addFilter(_WITHOUT_REMARK)  # once, however often
    try:
        context = ssl.create_default_context(cafile=settings.tls_ca)
        if settings.tls_cert is not None:
            context.load_cert_chain(settings.tls_cert, settings.tls_key)
    except OSError as error:
        raise SetupError(f"the TLS files of the broker settings cannot be used: {error}") from error
    return context
