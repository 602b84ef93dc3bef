"""nats-py's parser with a shorter way for messages: one search for the end of a line, and no regular expressions.

Reads what the socket gave, hands messages to the client. Everything that is no message goes through nats-py's own parser, as does a line
that begins like one and is not well formed.
"""

from typing import Any

from nats.protocol.parser import AWAITING_CONTROL_LINE, Parser

_END = b"\r\n"
_END_BYTES = len(_END)


class FastParser(Parser):
    """For one client. `parse` is not called again before it has returned."""

    nc: Any
    buf: bytearray
    state: int

    async def parse(self, data: bytes = b"") -> None:
        if self.state != AWAITING_CONTROL_LINE:  # nats-py's own parser is in the middle of a message
            await super().parse(data)
            return
        self.buf += data
        buffer, place, is_whole = self.buf, 0, True
        try:
            while (line_end := buffer.find(_END, place)) >= 0 and (head := _head_of(bytes(buffer[place:line_end]).split())) is not None:
                subject, sid, reply, headers_bytes, size = head
                body = line_end + _END_BYTES
                payload, end = body + headers_bytes, body + size
                is_whole = end + _END_BYTES <= len(buffer)
                if not is_whole:
                    break
                place = end + _END_BYTES
                headers = bytes(buffer[body:payload]) if headers_bytes else None
                await self.nc._process_msg(sid, subject, reply, bytes(buffer[payload:end]), headers)
                if self.buf is not buffer:  # the connection was given up meanwhile
                    return
        finally:
            del buffer[:place]
        if buffer and is_whole:
            await super().parse()


def _head_of(words: list[bytes]) -> tuple[bytes, int, bytes, int, int] | None:
    """Subject, subscription, reply, and the bytes of the headers and of headers and payload. None: no message begins like this."""
    try:
        match words:
            case [b"MSG", subject, sid, size]:
                return subject, int(sid), b"", 0, int(size)
            case [b"MSG", subject, sid, reply, size]:
                return subject, int(sid), reply, 0, int(size)
            case [b"HMSG", subject, sid, headers_bytes, size]:
                return subject, int(sid), b"", int(headers_bytes), int(size)
            case [b"HMSG", subject, sid, reply, headers_bytes, size]:
                return subject, int(sid), reply, int(headers_bytes), int(size)
            case _:
                return None
    except ValueError:
        return None
