"""nats-py's client, with a shorter way for messages, and four things mended that it does to whoever waits.

`listen`: messages go from the parser straight to a plain function, without a queue, a task and an object of nats-py for each. What is
published in one turn of the event loop is written at its end, in one piece, without waking a task for that.

`HearingClient`: whoever gives up waiting for the answer to a ping leaves the connection hearing.

Flushes, drains of a subscription and measured round trips wait for a ping. nats-py keeps what they wait with when they are cancelled
or out of time, and its reading loop ends for good when the answer comes all the same: after a partition, for example. The connection
then looks alive and hears nothing until it has missed three pings of its own.

Its pings also overtake what waits in its own buffer, so that the answer to one said nothing of what was sent just before: an order to leave
a subject, for example, after which messages came that nobody took any more.

And it lets go of a lost connection only when all that was written to it is sent: to a broker that is frozen or cut off, with more under way
than the sockets hold, that is never, and meanwhile nobody is told and no other server of a cluster is tried.

`keeping_cancels`: a cancel that comes together with what was waited for is not lost (`asyncio.wait_for` of Python 3.11, which nats-py
uses, loses it, and nats-py itself does while its buffer is full). A loop that loses its cancel goes on for ever.
"""

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

from nats.aio.client import PING_PROTO, Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport

from .fast_parser import FastParser
from .raw import NO_HEADERS, RawMessage

Take = Callable[[RawMessage], None]

_WRITE_AT_ONCE_BYTES = 256 << 10
"""While the socket has more than this to send, nats-py's own flusher waits for it."""
_STATUS_FOLLOWS = ord(" ")
_VERSION_BYTES = len("NATS/1.0")


class HearingClient(Client):
    _pongs: "list[asyncio.Future[bool]]"

    def __init__(self) -> None:
        super().__init__()
        self._ps = FastParser(self)
        self._will_write = False

    async def listen(self, subject: str, queue: str, take: Take) -> Subscription:
        """`take` runs in the parser's turn, in order; what it raises goes to the client's error callback."""
        # No limits on what waits: nothing does, and a dropped message is worse than a full pipe. (Its type is partly unknown.)
        return await self.subscribe(  # pyright: ignore[reportUnknownMemberType]
            subject, queue=queue, cb=partial(_hand_over, take), pending_msgs_limit=0, pending_bytes_limit=0
        )

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        subscription = self._subs.get(sid)
        taker: Any = subscription._cb if subscription is not None else None  # pyright: ignore[reportPrivateUsage]
        if not isinstance(taker, partial):
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        self.stats["in_msgs"] += 1
        self.stats["in_bytes"] += len(data)
        told: dict[str, str] | None = None
        if headers:
            if headers[_VERSION_BYTES] == _STATUS_FOLLOWS:
                told = await self._process_headers(headers)  # pyright: ignore[reportUnknownMemberType]
            else:
                told = self._parse_header_lines(headers[_VERSION_BYTES + 2 :])
        message = RawMessage(subject.decode(), data, MappingProxyType(told) if told else NO_HEADERS, reply.decode())
        try:
            taker.args[0](message)
        except Exception as error:  # noqa: BLE001  as nats-py does: a callback that fails ends nothing
            await self._error_cb(error)

    async def _flush_pending(self, force_flush: bool = False) -> Any:
        if force_flush or not self._can_write():
            return await super()._flush_pending(force_flush)
        if not self._will_write:
            self._will_write = True
            asyncio.get_running_loop().call_soon(self._write)
        return None

    def _can_write(self) -> bool:
        writer = self._writer()
        return self.is_connected and writer is not None and writer.transport.get_write_buffer_size() < _WRITE_AT_ONCE_BYTES

    def _write(self) -> None:
        self._will_write = False
        if self._pending and self.is_connected and self._transport is not None:
            waiting, self._pending, self._pending_data_size = self._pending, [], 0
            self._transport.writelines(waiting)

    async def _attempt_reconnect(self) -> None:
        self.abandon()
        await super()._attempt_reconnect()

    def abandon(self) -> None:
        """Lets go of the connection with what is still to be sent on it: what must not be lost is sent again."""
        writer = self._writer()
        if writer is not None:
            writer.transport.abort()

    def _writer(self) -> asyncio.StreamWriter | None:
        socket = self._transport
        return socket._io_writer if isinstance(socket, TcpTransport) else None  # pyright: ignore[reportPrivateUsage]

    @property
    def is_clustered(self) -> bool:
        """Whether the server says that it is one of several."""
        return bool(self._server_info.get("cluster"))

    async def _process_pong(self) -> None:
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()  # nobody waits for it any more
        await super()._process_pong()

    async def _send_ping(self, future: "asyncio.Future[bool] | None" = None) -> None:
        self._pongs.append(future or asyncio.get_running_loop().create_future())
        await self._send_command(PING_PROTO)  # behind what waits: then the answer says that the broker has seen it
        await self._flush_pending()


async def _hand_over(take: Take, message: Msg) -> None:
    """Should nats-py itself bring one."""
    take(RawMessage(message.subject, message.data, MappingProxyType(message.headers) if message.headers else NO_HEADERS, message.reply))


@contextmanager
def keeping_cancels() -> Generator[None]:
    """Raises CancelledError at the end of the body when this task was cancelled in it and did not notice."""
    task = asyncio.current_task()
    before = task.cancelling() if task else 0
    yield
    if task and task.cancelling() > before:
        raise asyncio.CancelledError
