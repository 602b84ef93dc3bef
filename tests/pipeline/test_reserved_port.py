"""A reserved port: listened on by whom it is for, given to nobody else."""

import socket

import pytest

from jetwake.pipeline.reserved_port import ReservedPort
from jetwake.producers.gateway.server import bind


def test_whom_it_is_for_listens_on_it_again_and_again() -> None:
    with ReservedPort() as reserved:
        for _ in range(2):
            with bind("127.0.0.1", reserved.port), socket.create_connection(("127.0.0.1", reserved.port)):
                pass


def test_nobody_who_asks_for_any_port_is_given_it() -> None:
    """Neither by binding, with and without reuse, nor by connecting; and whoever asks for that very one is refused."""
    with ReservedPort() as reserved, socket.create_server(("127.0.0.1", 0)) as server:
        given: list[socket.socket] = []
        try:
            for number in range(200):
                other = socket.socket()
                given.append(other)
                if number % 2:
                    other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                other.bind(("127.0.0.1", 0))
            connected = socket.create_connection(server.getsockname())
            given.append(connected)
            assert reserved.port not in {other.getsockname()[1] for other in given}
        finally:
            for other in given:
                other.close()
        with pytest.raises(OSError, match="in use"):
            socket.socket().bind(("127.0.0.1", reserved.port))


def test_a_port_that_is_listened_on_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(OSError, match="in use"):
        ReservedPort(port=server.getsockname()[1])


def test_it_is_free_afterwards() -> None:
    with ReservedPort() as reserved:
        pass
    with socket.socket() as other:
        other.bind(("127.0.0.1", reserved.port))
