"""The requests that go on with a streamed response: recognised, and turned into the request that the response was made of.

`GET /v1/requests/{id}/stream?after=N`, or the same POST again; both may have `Last-Event-ID`. Promises: only the tenant that asked gets
it; what cannot be gone on with exactly is refused.
"""

import json
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

from ...schemas.errors import InvalidRequest, NotResumable, Undecodable
from .exchange import Exchange
from .kept_streams import KeptStreams, unknown
from .positions import START, Point, point_in, split_event_id
from .streaming import Streaming

RESUMABLE = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages"})
"""In other streams events have random ids, which would not be the same again."""
ROUTE = "/v1/requests/{id}/stream"
MAX_KEPT_BYTES = 1 << 20
"""Of a body. Longer ones would push out those of many other streams."""
LAST_EVENT_ID_HEADER = b"last-event-id"
_BEFORE, _AFTER = ROUTE.split("{id}")

Headers = Iterable[tuple[bytes, bytes]]


@dataclass(frozen=True)
class Wanted:
    request_id: str
    since: Point
    path: str | None = None


class Resuming:
    """`by_token`: the paths whose events depend on how tokens are cut; known when vLLM's application is made."""

    def __init__(self, kept: KeptStreams) -> None:
        self.by_token: frozenset[str] = frozenset()
        self._kept = kept

    def may_be_resumed(self, path: str, body: bytes) -> Streaming | None:
        """For a request that comes for the first time."""
        if path not in RESUMABLE or len(body) > MAX_KEPT_BYTES:
            return None
        return Streaming(path, body, path in self.by_token)

    async def found(self, wanted: Wanted, exchange: Exchange, body: bytes) -> Streaming:
        """Raises UnknownRequest, NotResumable, BusError."""
        try:
            record = await self._kept.find(wanted.request_id)
        except Undecodable as error:
            raise unknown(wanted.request_id) from error
        if record.tenant != exchange.tenant:
            raise unknown(wanted.request_id)
        if record.rendering != self._kept.rendering:
            raise NotResumable("this gateway serves another model, or has other flags, than the one where the stream began")
        if wanted.path is not None and wanted.path != record.path:
            raise NotResumable(f"the stream of {record.request_id} is one of {record.path}")
        if body.strip() and body != record.body and _fields(body) != _fields(record.body):
            raise NotResumable(f"the body is not the one that the stream of {record.request_id} was asked with: send the same, or none")
        return Streaming(record.path, record.body, record.path in self.by_token, resumed=record, since=wanted.since)


def wanted_in(scope: MutableMapping[str, Any]) -> Wanted | None:
    """What a request wants to go on with; None: it is no such request. Raises InvalidRequest."""
    path, headers = scope["path"], dict(scope["headers"])
    last = headers.get(LAST_EVENT_ID_HEADER, b"").decode("latin-1").strip()
    if scope["method"] == "POST":
        if path not in RESUMABLE or not last:
            return None
        return Wanted(*split_event_id(last), path)
    if scope["method"] != "GET" or not path.startswith(_BEFORE) or not path.endswith(_AFTER):
        return None
    request_id = path.removeprefix(_BEFORE).removesuffix(_AFTER)
    if last:
        named, since = split_event_id(last)
        if named != request_id:
            raise InvalidRequest(f"Last-Event-ID is of the request {named}, and not of {request_id[:96]}")
        return Wanted(request_id, since)
    after = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("after", [""])[-1]
    # The whole id of an event may be given, too.
    since = point_in(after.rpartition(":")[2]) if after else START
    split_event_id(f"{request_id}:0")  # an id that can be one
    return Wanted(request_id, since)


def first_scope(scope: MutableMapping[str, Any], streaming: Streaming) -> MutableMapping[str, Any]:
    """As if the response were asked for the first time."""
    dropped = (b"content-type", b"content-length", b"transfer-encoding", LAST_EVENT_ID_HEADER)
    headers = [(name, value) for name, value in scope["headers"] if name not in dropped]
    headers += [(b"content-type", b"application/json"), (b"content-length", str(len(streaming.body)).encode())]
    path = streaming.path
    return {**scope, "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"", "headers": headers}


def _fields(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body
