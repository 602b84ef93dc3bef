"""Where in a streamed response an event stands, and where a resumed one goes on. Pure.

Events are made of tokens, and how many tokens make an event depends on how they happened to come. So an event is not numbered by
counting: its id says after how many tokens it came, and the tokens are cut there when the response is made once more. A digest
of those tokens tells a gateway that has others that the answer is not the one which the client has begun to read.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ...pipeline.merge import tail
from ...schemas.errors import InvalidRequest
from ...schemas.replies import AnyTerminal, TokenChunk
from ...schemas.tokens import token_count

_EVENT_ID = re.compile(r"(?P<request>[A-Za-z0-9_-]{1,96}):(?P<position>[^:]{1,40})\Z")
_POSITION = re.compile(r"(?P<tokens>\d{1,9})(?:(?P<ended>e?)\.(?P<event>\d{1,6})\.(?P<digest>[0-9a-f]{8}))?\Z")
_ALL_EVENTS = 1_000_000


@dataclass(frozen=True, order=True)
class Position:
    """After so many tokens; `ended`: and after the answer's end was known; `event`: which of the events since then, from 0."""

    tokens: int
    ended: bool
    event: int


@dataclass(frozen=True)
class Point:
    """The last event that a client has. `digest`: of the tokens until there; None where only a number of tokens was named."""

    position: Position
    digest: int | None = None


START = Point(Position(0, False, -1))


def event_id(request_id: str, position: Position, digest: int) -> str:
    return f"{request_id}:{position.tokens}{'e' if position.ended else ''}.{position.event}.{digest:08x}"


def point_in(text: str) -> Point:
    """What follows the colon of an event's id, or a number of tokens. Raises InvalidRequest."""
    found = _POSITION.match(text)
    if found is None:
        raise InvalidRequest(f"{text[:40]!r} is no place in a stream: give the id of its last event as it was sent, or a number of tokens")
    tokens = int(found["tokens"])
    if found["digest"] is None:
        return Point(Position(tokens, False, _ALL_EVENTS)) if tokens else START
    return Point(Position(tokens, bool(found["ended"]), int(found["event"])), int(found["digest"], 16))


def split_event_id(text: str) -> tuple[str, Point]:
    """Request and place. Raises InvalidRequest."""
    found = _EVENT_ID.match(text)
    if found is None:
        raise InvalidRequest(f"Last-Event-ID {text[:80]!r} is not the id of an event of a stream from here")
    return found["request"], point_in(found["position"])


def cut(reply: TokenChunk | AnyTerminal, at_each_token: bool, at: tuple[int, ...]) -> Iterator[TokenChunk | AnyTerminal]:
    """The same reply, in parts that end after these numbers of tokens."""
    if not isinstance(reply, TokenChunk) or (count := token_count(reply.tokens)) <= 1:
        yield reply
        return
    end = reply.offset + count
    ends = range(reply.offset + 1, end) if at_each_token else sorted({place for place in at if reply.offset < place < end})
    start = reply.offset
    for place in (*ends, end):
        rest = tail(reply, start)
        assert rest is not None
        length = place - start
        yield rest.model_copy(update={"tokens": rest.tokens[: 4 * length], "logprobs": rest.logprobs[:length]})
        start = place
