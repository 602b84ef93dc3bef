"""Streamed chat by a shorter way: the same handler of vLLM's, without the framework around it. Imports vLLM.

Between the route and the handler stand a search for dependencies, a second parse of the content type, two exit stacks, and five tasks that
watch for each other's end, for each request. Here the body is parsed straight into vLLM's request, and one task listens for the client's
leaving. What is no streamed chat request, or has anything wrong with it, goes the long way, so that all answers and errors are the same.
"""

import asyncio
import re
from contextlib import aclosing
from typing import Any

from fastapi.responses import JSONResponse
from starlette.requests import Request
from starlette.routing import Route
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse

from .front import Message, Receive, Scope, Send

CHAT = "/v1/chat/completions"
_STREAMED = re.compile(rb'"stream"\s*:\s*true')
_JSON = b"application/json"
_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8")]


def shorten(app: Any) -> None:
    """For an application that serves chat and counts nothing for it."""
    if getattr(app.state, "openai_serving_chat", None) is None or getattr(app.state, "enable_server_load_tracking", False):
        return
    for number, route in enumerate(app.router.routes):
        if getattr(route, "path", None) == CHAT:
            app.router.routes[number] = Route(CHAT, ShortWay(app.state.openai_serving_chat, route), methods=["POST"])


class ShortWay:
    """An ASGI application. `chat`: vLLM's handler; `long_way`: the route that led to it. The body comes in one piece."""

    def __init__(self, chat: Any, long_way: Route) -> None:
        self._chat = chat
        self._long_way = long_way

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        request = _request_in(scope, message)
        if request is None:
            await self._long_way.handle(scope, _again(message, receive), send)
            return
        reading = asyncio.timeout(None)
        try:
            async with reading:
                listening = asyncio.create_task(_listen(receive, reading))
                try:
                    await self._answer(request, scope, receive, send)
                finally:
                    listening.cancel()
        except TimeoutError:
            if not reading.expired():
                raise
            # The client left: nobody waits for a response.

    async def _answer(self, request: ChatCompletionRequest, scope: Scope, receive: Receive, send: Send) -> None:
        made = await self._chat.create_chat_completion(request, Request(scope, receive))
        if isinstance(made, ErrorResponse):
            await JSONResponse(made.model_dump(), made.error.code)(scope, receive, send)
            return
        async with aclosing(made) as events:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            async for event in events:
                await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def _request_in(scope: Scope, message: Message) -> ChatCompletionRequest | None:
    """None: not for here."""
    content_type = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
    body: bytes = message.get("body", b"")
    if message.get("more_body", False) or content_type.partition(b";")[0] != _JSON or _STREAMED.search(body) is None:
        return None
    try:
        request = ChatCompletionRequest.model_validate_json(body)
    except Exception:  # noqa: BLE001  whatever it is, the long way says it
        return None
    return request if request.stream else None


def _again(message: Message, receive: Receive) -> Receive:
    """As if the message had not been read."""
    read = [message]

    async def again() -> Message:
        return read.pop() if read else await receive()

    return again


async def _listen(receive: Receive, reading: asyncio.Timeout) -> None:
    while (await receive())["type"] != "http.disconnect":
        """Nothing else is expected."""
    reading.reschedule(asyncio.get_running_loop().time())
