"""nats-py's client, with one thing mended: whoever gives up waiting for the answer to a ping leaves the connection hearing.

Flushes, drains of a subscription and measured round trips wait for a ping. nats-py keeps what they wait with when they are cancelled
or out of time, and its reading loop ends for good when the answer comes all the same: after a partition, for example. The connection
then looks alive and hears nothing until it has missed three pings of its own.
"""

import asyncio

from nats.aio.client import Client


class HearingClient(Client):
    _pongs: "list[asyncio.Future[bool]]"

    async def _process_pong(self) -> None:
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()  # nobody waits for it any more
        await super()._process_pong()
