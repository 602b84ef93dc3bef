"""The shorter way through the parser says what nats-py's own says, however the bytes come."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nats.errors import ProtocolError
from nats.protocol.parser import Parser

from jetwake.pipeline.fast_parser import FastParser

SUBJECT = st.sampled_from([b"a", b"jw.replies.gateway-1.0123", b"_INBOX.x.7"])
PAYLOAD = st.binary(max_size=60) | st.just(b"\r\nMSG a 1 3\r\n") | st.binary(min_size=9000, max_size=9001)
SID = st.integers(1, 999).map(lambda number: str(number).encode())


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    payload, subject, sid = draw(PAYLOAD), draw(SUBJECT), draw(SID)
    reply = draw(st.sampled_from([b"", b"$JS.ACK.S.d.1.2.3.4.5 "]))
    if draw(st.booleans()):
        return b"MSG %b %b %b%d\r\n%b\r\n" % (subject, sid, reply, len(payload), payload)
    headers = draw(st.sampled_from([b"NATS/1.0\r\nA: b\r\n\r\n", b"NATS/1.0 503\r\n\r\n"]))
    return b"HMSG %b %b %b%d %d\r\n%b%b\r\n" % (subject, sid, reply, len(headers), len(headers) + len(payload), headers, payload)


REMARKS = st.sampled_from([b"PING\r\n", b"PONG\r\n", b"+OK\r\n", b"-ERR 'slow consumer'\r\n", b'INFO {"server_id":"s"}\r\n'])


class Heard:
    """What a parser tells its client."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    async def _process_msg(self, *message: Any) -> None:
        self.told.append(message)

    async def _process_ping(self) -> None:
        self.told.append("ping")

    async def _process_pong(self) -> None:
        self.told.append("pong")

    async def _process_err(self, text: str) -> None:
        self.told.append(text)

    async def _process_info(self, info: dict[str, Any]) -> None:
        self.told.append(info)


async def told_by(make: type[Parser], parts: list[bytes]) -> list[Any]:
    heard = Heard()
    parser = make(heard)
    for part in parts:
        await parser.parse(part)
    assert not parser.buf
    return heard.told


@settings(deadline=None)
@given(st.lists(messages() | REMARKS, max_size=12), st.data())
async def test_the_same_is_told(lines: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=12)))
    parts = [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    told = await told_by(FastParser, parts)
    assert len(told) == len(lines) - lines.count(b"+OK\r\n")
    assert told == await told_by(Parser, parts)


@pytest.mark.parametrize("line", [b"MSG a x 3\r\nabc\r\n", b"HMSG a 1 3\r\nabc\r\n", b"NONSENSE\r\n"])
async def test_what_is_no_message_is_refused(line: bytes) -> None:
    with pytest.raises(ProtocolError):
        await told_by(FastParser, [line])
