"""How two engines get to know each other before KV moves: one TCP connection, one framed request, one framed reply.

A frame is the length (4 bytes, little-endian) and a msgpack message. The reply says which engine answers and what NIXL needs to
read its memory. Whatever goes wrong (nobody there, garbage, another engine at that address, no answer in time) is PullFailed.
"""

import asyncio
from typing import Literal

from ..schemas.codec import Message, decode, encode
from ..schemas.errors import PullFailed, Undecodable

MAX_FRAME_BYTES = 1 << 20
SERVE_TIMEOUT_S = 5.0


class WhoIsThere(Message):
    type: Literal["who_is_there"] = "who_is_there"
    asking_engine_id: str


class Introduction(Message):
    """`arena_address`: where block 0 lies in the memory of that engine; the blocks follow one another."""

    type: Literal["introduction"] = "introduction"
    engine_id: str
    agent_metadata: bytes
    arena_address: int
    block_bytes: int
    num_blocks: int


class SideChannelServer:
    """Answers every question with the same introduction. Opened by `start`, closed by `stop` (twice is safe)."""

    def __init__(self, introduction: Introduction) -> None:
        self._reply = encode(introduction)
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Returns the port, which is a free one for port 0. Raises OSError."""
        self._server = await asyncio.start_server(self._answer, host, port)
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()
            await server.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(SERVE_TIMEOUT_S):
                decode(await _read_frame(reader), WhoIsThere)
                _write_frame(writer, self._reply)
                await writer.drain()
        except (Undecodable, EOFError, OSError, TimeoutError):
            pass  # the one who asked sees a closed connection; nothing here depends on it
        finally:
            writer.close()


async def introduce(host: str, port: int, expected_engine_id: str, asking_engine_id: str) -> Introduction:
    """Ask who is there. Raises PullFailed unless `expected_engine_id` answers. The caller sets the limit of time."""
    address = f"{expected_engine_id} at {host}:{port}"
    try:
        found = await _ask(host, port, asking_engine_id)
    except (OSError, EOFError, Undecodable) as error:
        raise PullFailed(f"no handshake with {address}: {error}") from error
    if found.engine_id != expected_engine_id:
        raise PullFailed(f"expected {address}, but {found.engine_id} is there")
    return found


async def _ask(host: str, port: int, asking_engine_id: str) -> Introduction:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        _write_frame(writer, encode(WhoIsThere(asking_engine_id=asking_engine_id)))
        return decode(await _read_frame(reader), Introduction)
    finally:
        writer.close()


def _write_frame(writer: asyncio.StreamWriter, payload: bytes) -> None:
    writer.write(len(payload).to_bytes(4, "little") + payload)


async def _read_frame(reader: asyncio.StreamReader) -> bytes:
    size = int.from_bytes(await reader.readexactly(4), "little")
    if size > MAX_FRAME_BYTES:
        raise Undecodable(f"a frame of {size} bytes is over {MAX_FRAME_BYTES}")
    return await reader.readexactly(size)
