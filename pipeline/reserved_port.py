"""A port that is promised to a process which listens on it later, or again and again: nobody else is given it meanwhile.

Binds without listening. Where both sides allow reuse (servers do: uvicorn, ZeroMQ, nats-server), the process may listen on the port as
often as it likes; a socket that asks for any free port, or connects from one, is not given it.
"""

import socket
from typing import Self


class ReservedPort:
    """From construction until `free`. `port` 0: any free one. Raises OSError when it is taken, or `host` is no address of this machine."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, port))
        except OSError:
            self._socket.close()
            raise
        self.port: int = self._socket.getsockname()[1]

    def free(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.free()
