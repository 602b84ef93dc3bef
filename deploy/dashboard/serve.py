"""The page by itself, for `jetwake dashboard`: on loopback, against any broker."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Generator

import uvicorn

from ...pipeline.settings import BrokerSettings
from ...schemas.errors import SetupError
from .server import HOST, PATH, Dashboard, for_loopback


class _Server(uvicorn.Server):
    """Signals belong to the command."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


async def serve_dashboard(broker: BrokerSettings, port: int, stopping: asyncio.Event, on_ready: Callable[[str], None]) -> None:
    """Until `stopping`. `port` 0: any free one. Raises SetupError when it is taken."""
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((HOST, port))
        except OSError as error:
            raise SetupError(f"cannot listen on {HOST}:{port}: {error.strerror}; give another --port (0: any free one)") from error
        dashboard = Dashboard(broker)
        server = _Server(uvicorn.Config(for_loopback(dashboard.app), lifespan="off", log_level="warning", access_log=False))
        listening.listen()
        on_ready(f"http://{HOST}:{listening.getsockname()[1]}{PATH}/")
        async with asyncio.TaskGroup() as tasks:
            following = tasks.create_task(dashboard.run())
            serving = tasks.create_task(server.serve(sockets=[listening]))
            await stopping.wait()
            server.should_exit = True
            await serving
            following.cancel()
