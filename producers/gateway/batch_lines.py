"""Asks the gateway's own application for one line of a batch, as a client would over HTTP, in the batch class.

Promises: a line that is left half-way ends at the workers when its batch is to end, and runs on otherwise; a refusal for the moment is
no result, and the stored end of a request is one, whatever its status.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, cast

from ...pipeline.clock import Clock
from ...pipeline.connection import Bus
from ...pipeline.publish import Publisher
from ...pipeline.replies import ReplyInbox
from ...schemas import subjects
from ...schemas.batches import BatchRecord, LineError, LineResult
from ...schemas.errors import RequestFailed
from ...schemas.openai_endpoints import ENDPOINTS
from ..batches.lines import Line, LineFile
from ..batches.running import LineAnswer
from .batch_requests import BatchRequests, Sending
from .body import refused_field
from .exchange import Exchange, Job
from .front import App, Headers
from .in_process import Head, StreamEvent, call

_ENDPOINT_OF = {endpoint.path: endpoint for endpoint in ENDPOINTS.values()}
_TRY_AGAIN = (429, 503)
_PATIENCE_S = 1.0


class LineAsking:
    """One batch. `model`: as the queue knows it, whatever name the lines use."""

    def __init__(self, app: App, requests: BatchRequests, record: BatchRecord, model: str, source: LineFile, headers: Headers) -> None:
        self.cancelling = False
        self._app = app
        self._requests = requests
        self._record = record
        self._model = model
        self._source = source
        self._headers = headers

    async def __call__(self, line: Line, may_be_sent: bool) -> LineAnswer:
        record, sending = self._record, Sending(may_be_sent)
        request_id = subjects.batch_request(record.batch_id, line.number)
        exchange = Exchange(
            request_id=request_id,
            cache_salt=record.cache_salt,
            priority_class="batch",
            tenant=record.owner,
            admitted=True,
            job=Job(self._requests.name, record.expires_ns, self._requests.of(sending)),
        )
        answered = await self._call(self._source.body(line), exchange)
        if answered is None:
            return LineAnswer(try_again_s=_PATIENCE_S, sent=sending.unsure)
        head, body = answered
        if head.status in _TRY_AGAIN and not await self._requests.has_ended(request_id, self._model):
            return LineAnswer(try_again_s=max(_PATIENCE_S, float(head.headers.get("retry-after", 0))), sent=sending.unsure)
        return LineAnswer(_result(record.batch_id, line, request_id, head.status, body), sent=sending.unsure)

    async def _call(self, body: bytes, exchange: Exchange) -> tuple[Head, bytes] | None:
        """In a task of its own: vLLM's handlers end when the client is gone, and not when whoever called them is cancelled."""
        gone = asyncio.Event()
        made: list[tuple[Head, bytes]] = []

        async def document(head: Head, body: bytes) -> None:
            made.append((head, body))

        async def event(head: Head, event: StreamEvent) -> None:
            raise RequestFailed("the application streams what was not asked for as a stream", "internal")

        endpoint = _ENDPOINT_OF[self._record.endpoint]
        calling = asyncio.create_task(call(self._app, endpoint, self._headers, body, exchange, gone, document, event))
        try:
            await asyncio.shield(calling)
        except asyncio.CancelledError:
            gone.set()
            await asyncio.wait([calling])
            if self.cancelling:
                await self._requests.cancel(exchange.request_id, exchange.submitted)
            raise
        return made[0] if made else None


def _result(batch_id: str, line: Line, request_id: str, status: int, body: bytes) -> LineResult:
    try:
        fields: Any = json.loads(body)
    except ValueError:  # a result must be JSON, whatever the application says
        fields = {"error": {"message": body.decode(errors="replace")[:500], "type": "server_error", "param": None, "code": "internal"}}
        body = json.dumps(fields).encode()
    usage = cast(dict[str, Any], (cast(dict[str, Any], fields).get("usage") if isinstance(fields, dict) else None) or {})
    details: dict[str, Any] = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return LineResult(
        batch_id=batch_id,
        line=line.number,
        custom_id=line.custom_id,
        request_id=request_id,
        status=status,
        body=body,
        prompt_tokens=int(usage.get("prompt_tokens") or usage.get("input_tokens") or 0),
        cached_tokens=int(details.get("cached_tokens") or 0),
        output_tokens=int(usage.get("completion_tokens") or usage.get("output_tokens") or 0),
    )


AskingFor = Callable[[BatchRecord, LineFile], AbstractAsyncContextManager[LineAsking]]


def asking_for(
    app: App, bus: Bus, publisher: Publisher, clock: Clock, model: str, headers: Headers, name: str = subjects.BATCHES
) -> AskingFor:
    """How lines of a batch are asked for. `headers` go with each. `name`: whose the replies are."""

    @asynccontextmanager
    async def ask_for(record: BatchRecord, source: LineFile) -> AsyncGenerator[LineAsking]:
        inbox = ReplyInbox(bus, name, clock, shared=True)
        await inbox.start()
        try:
            yield LineAsking(app, BatchRequests(bus, publisher, inbox), record, model, source, headers)
        finally:
            await inbox.close()

    return ask_for


def body_check(check: Callable[[str, bytes], LineError | None]) -> Callable[[str, dict[str, Any]], LineError | None]:
    """What is refused of a body before it is sent. `check`: what vLLM's own front end says."""

    def refused(endpoint: str, body: dict[str, Any]) -> LineError | None:
        text = json.dumps(body).encode()
        failure = refused_field(text)
        if failure is not None:
            return LineError(code=failure.code, message=failure.text, param=failure.param)
        return check(endpoint, text)

    return refused
