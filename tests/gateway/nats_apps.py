"""Small ASGI applications that behave like the gateway's, for what lies around it."""

import asyncio
import json
from typing import Any

from jetwake.producers.gateway import exchange as exchanges
from jetwake.producers.gateway.exchange import EXCHANGE_KEY
from jetwake.schemas.replies import Finished, TokenChunk
from jetwake.schemas.requests import InferenceRequest, Sampling
from jetwake.schemas.tokens import pack_tokens

TOKENS = 300
SSE = [(b"content-type", b"text/event-stream; charset=utf-8")]
JSON = [(b"content-type", b"application/json")]


class EchoApp:
    """Answers with what it was asked: as a document, or as a stream with an event for each word of `say`. `hold`: waits for `go`."""

    def __init__(self) -> None:
        self.calls = 0
        self.left = 0
        self.go = asyncio.Event()
        self.waiting = asyncio.Event()
        self.exchanges: list[exchanges.Exchange] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.calls += 1
        exchange: exchanges.Exchange = scope[EXCHANGE_KEY]
        self.exchanges.append(exchange)
        body: Any = json.loads((await receive())["body"] or b"{}")
        own = [(b"x-jetwake-request-id", exchange.request_id.encode())]
        if body.get("hold") and not await self._held(receive):
            self.left += 1
            await send({"type": "http.response.start", "status": 200, "headers": JSON})
            await send({"type": "http.response.body", "body": b"null"})  # as frameworks do for a handler that was cut off
            return
        if body.get("status"):
            await send({"type": "http.response.start", "status": body["status"], "headers": [*JSON, *own, (b"retry-after", b"0")]})
            await send({"type": "http.response.body", "body": b'{"error": {"message": "no"}}'})
        elif body.get("stream"):
            await send({"type": "http.response.start", "status": 200, "headers": [*SSE, *own]})
            text = (
                "".join(f"event: word\ndata: {json.dumps(word)}\n\n" for word in body["say"].split()) + ": keep-alive\n\ndata: [DONE]\n\n"
            )
            for position in range(0, len(text), 7):  # however it is cut
                await send({"type": "http.response.body", "body": text[position : position + 7].encode(), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        else:
            headers = {name.decode(): value.decode() for name, value in scope["headers"]}
            answer = {"path": scope["path"], "method": scope["method"], "headers": headers, "body": body}
            await send({"type": "http.response.start", "status": 200, "headers": [*JSON, *own]})
            await send({"type": "http.response.body", "body": json.dumps(answer).encode()})

    async def _held(self, receive: Any) -> bool:
        self.waiting.set()
        gone, go = asyncio.ensure_future(receive()), asyncio.ensure_future(self.go.wait())
        await asyncio.wait({gone, go}, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        return go.done()


class AskingApp(EchoApp):
    """Answers with the tokens of a request of its own, sent as the exchange's job wants it sent. `begun`: the first of them are there."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.calls += 1
        exchange: exchanges.Exchange = scope[EXCHANGE_KEY]
        self.exchanges.append(exchange)
        job = exchange.job
        assert job is not None
        request = InferenceRequest(
            request_id=exchange.next_request_id(),
            gateway=job.gateway,
            model="sim",
            prompt_tokens=pack_tokens(range(20)),
            sampling=Sampling(max_tokens=TOKENS, ignore_eos=True),
            deadline_ns=job.deadline_ns,
        )
        await receive()
        reading, gone = asyncio.ensure_future(self._read(await job.submit(request))), asyncio.ensure_future(receive())
        await asyncio.wait({reading, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            reading.cancel()
            return
        gone.cancel()
        await send({"type": "http.response.start", "status": 200, "headers": JSON})
        await send({"type": "http.response.body", "body": reading.result()})

    async def _read(self, replies: Any) -> bytes:
        answer = b""
        async for reply in replies:
            if isinstance(reply, TokenChunk):
                answer += reply.tokens
                self.begun.set()
            else:
                assert isinstance(reply, Finished), reply
        return answer.hex().encode()
