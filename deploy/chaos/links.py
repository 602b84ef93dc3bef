"""A TCP link between one process and the broker that can be cut, fall silent, or disturb plain messages: real sockets, no privileges.

Silence is what a partition looks like to both ends: nothing arrives, no connection ends, and what was under way arrives when it is
over. Only plain messages are disturbed, those that may be lost by the pipeline's own rules: events, loads, decisions and replies.
"""

import asyncio
import contextlib
import random
import socket
import ssl
from collections.abc import Sequence
from typing import Self

from ..certificates import CLIENT, certificate_file, key_file
from ..nats_config import ServerTls

DISTURBED = (b"jw.kv.", b"jw.load.", b"jw.routed.", b"jw.replies.")
SHARE = 0.3
_READ_BYTES = 1 << 16


class Disturbance:
    """What becomes of one process's plain messages while it lasts. Pure but for its dice."""

    def __init__(self, manner: str, seed: float) -> None:
        self._manner = manner
        self._dice = random.Random(seed)
        self._late = b""

    def pass_on(self, frame: bytes) -> bytes:
        """The bytes to send instead of `frame`, one whole protocol message."""
        late, self._late = self._late, b""
        if not is_disturbed(frame) or self._dice.random() >= SHARE:
            return frame + late
        if self._manner == "lose":
            return late
        if self._manner == "double":
            return frame + frame + late
        self._late = frame
        return late

    def rest(self) -> bytes:
        late, self._late = self._late, b""
        return late


def is_disturbed(frame: bytes) -> bool:
    """Whether it publishes, to nobody who would answer, on a subject whose messages may be lost."""
    words = frame[: frame.find(b"\r\n")].split()
    plain = (words[0] == b"PUB" and len(words) == 3) or (words[0] == b"HPUB" and len(words) == 4) if words else False
    return plain and words[1].startswith(DISTURBED)


class Link:
    """Listens on a port of its own and connects each who comes to the broker. A context manager.

    `receive_bytes`: how much of the broker's words the kernel takes in while the link is silent; 0: as it likes, some megabytes.
    `tls`: of the broker. To whoever comes the link is that broker, and to the broker a client, so that it sees what is said.
    """

    def __init__(self, name: str, broker_port: int, host: str = "127.0.0.1", receive_bytes: int = 0, tls: ServerTls | None = None) -> None:
        self.name = name
        self._tls = contexts(tls) if tls is not None else None
        self._host = host
        self._broker_port = broker_port
        self._receive_bytes = receive_bytes
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_cut = False
        self._speaks = asyncio.Event()
        self._speaks.set()
        self._disturbance: Disturbance | None = None
        self._late = b""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, self._host, 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"nats://{self._host}:{self._server.sockets[0].getsockname()[1]}"

    @property
    def is_used(self) -> bool:
        return bool(self._writers)

    # -- faults -----------------------------------------------------------------------------------------------------

    def cut(self) -> None:
        """Every connection ends at once, and a new one too."""
        self._is_cut = True
        for writer in self._writers:
            writer.transport.abort()

    def silence(self) -> None:
        self._speaks.clear()

    def disturb(self, manner: str, seed: float) -> None:
        self._disturbance = Disturbance(manner, seed)

    def heal(self) -> None:
        self._is_cut = False
        self._speaks.set()

    def calm(self) -> None:
        if self._disturbance is not None:
            self._late += self._disturbance.rest()
            self._disturbance = None

    # -- the two directions -------------------------------------------------------------------------------------------

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            await self._connect(reader, writer)
        except (OSError, EOFError, asyncio.LimitOverrunError):
            return  # one end is gone, and so is the other
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._speaks.wait()
        if self._is_cut:
            return
        broker_reader, broker_writer = await asyncio.open_connection(sock=await self._broker_socket())
        self._writers.add(broker_writer)
        if self._tls is not None:
            await self._begin_tls(broker_reader, broker_writer, writer, *self._tls)
        directions = [asyncio.create_task(self._up(reader, broker_writer)), asyncio.create_task(self._down(broker_reader, writer))]
        try:
            await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for direction in directions:
                direction.cancel()
            await asyncio.gather(*directions, return_exceptions=True)
            self._writers.discard(broker_writer)
            with contextlib.suppress(OSError):
                broker_writer.close()  # what is written already still goes: the client may have closed right after its last word

    async def _begin_tls(
        self,
        broker_reader: asyncio.StreamReader,
        broker_writer: asyncio.StreamWriter,
        writer: asyncio.StreamWriter,
        as_broker: ssl.SSLContext,
        as_client: ssl.SSLContext,
    ) -> None:
        """NATS says one line first. No wait between passing that on and being ready for the answer."""
        writer.write(await broker_reader.readline())
        await writer.start_tls(as_broker)
        await broker_writer.start_tls(as_client, server_hostname=self._host)

    async def _broker_socket(self) -> socket.socket:
        made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        made.setblocking(False)
        try:
            if self._receive_bytes:
                made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._receive_bytes)
            await asyncio.get_running_loop().sock_connect(made, (self._host, self._broker_port))
        except BaseException:
            made.close()
            raise
        return made

    async def _up(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """From the process to the broker, one protocol message at a time."""
        while line := await reader.readline():
            if line.startswith((b"PUB ", b"HPUB ")):
                line += await reader.readexactly(int(line.rsplit(None, 1)[1]) + 2)
            await self._speaks.wait()
            if self._late:
                line, self._late = line + self._late, b""
            writer.write(line if self._disturbance is None else self._disturbance.pass_on(line))
            await writer.drain()

    async def _down(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_READ_BYTES):
            await self._speaks.wait()
            writer.write(data)
            await writer.drain()


def contexts(tls: ServerTls) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """As the broker, and as its client, whose certificate lies beside the broker's."""
    as_broker = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=tls.ca_file)
    as_broker.load_cert_chain(tls.cert_file, tls.key_file)
    as_broker.verify_mode = ssl.CERT_REQUIRED
    as_client = ssl.create_default_context(cafile=tls.ca_file)
    folder = tls.ca_file.parent
    as_client.load_cert_chain(certificate_file(folder, CLIENT), key_file(folder, CLIENT))
    return as_broker, as_client


class Links:
    """The ways of one process to every server of the broker: what is done to one is done to all. A context manager."""

    def __init__(self, name: str, broker_ports: Sequence[int], tls: ServerTls | None = None) -> None:
        self._links = [Link(name, port, tls=tls) for port in broker_ports]

    async def __aenter__(self) -> Self:
        for link in self._links:
            await link.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        for link in self._links:
            await link.__aexit__()

    @property
    def url(self) -> str:
        return ",".join(link.url for link in self._links)

    def cut(self) -> None:
        for link in self._links:
            link.cut()

    def silence(self) -> None:
        for link in self._links:
            link.silence()

    def disturb(self, manner: str, seed: float) -> None:
        for link in self._links:
            link.disturb(manner, seed)

    def heal(self) -> None:
        for link in self._links:
            link.heal()

    def calm(self) -> None:
        for link in self._links:
            link.calm()
