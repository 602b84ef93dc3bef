"""nats-py's client and three things that it does to whoever waits.

`HearingClient`: whoever gives up waiting for the answer to a ping leaves the connection hearing.

Flushes, drains of a subscription and measured round trips wait for a ping. nats-py keeps what they wait with when they are cancelled
or out of time, and its reading loop ends for good when the answer comes all the same: after a partition, for example. The connection
then looks alive and hears nothing until it has missed three pings of its own.

Its pings also overtake what waits in its own buffer, so that the answer to one said nothing of what was sent just before: an order to leave
a subject, for example, after which messages came that nobody took any more.

`keeping_cancels`: a cancel that comes together with what was waited for is not lost (`asyncio.wait_for` of Python 3.11, which nats-py
uses, loses it, and nats-py itself does while its buffer is full). A loop that loses its cancel goes on for ever.
"""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager

from nats.aio.client import PING_PROTO, Client


class HearingClient(Client):
    _pongs: "list[asyncio.Future[bool]]"

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


@contextmanager
def keeping_cancels() -> Generator[None]:
    """Raises CancelledError at the end of the body when this task was cancelled in it and did not notice."""
    task = asyncio.current_task()
    before = task.cancelling() if task else 0
    yield
    if task and task.cancelling() > before:
        raise asyncio.CancelledError
