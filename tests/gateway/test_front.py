"""What goes out on the wire around a handler: the front with handlers that do one thing each."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from jetwake.producers.gateway import exchange as exchanges
from jetwake.producers.gateway.failures import Failure
from jetwake.producers.gateway.front import Front
from jetwake.producers.gateway.metrics import GatewayMetrics
from jetwake.producers.gateway.settings import GatewaySettings

Handler = Callable[[Any, Any, Any], Awaitable[None]]
SSE = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream; charset=utf-8")]}
LOST = Failure(500, "engine_dead", "the engine died")


def chunk(text: str, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": text.encode(), "more_body": more}


async def post(handler: Handler, headers: dict[str, str] | None = None, body: bytes = b"{}", **settings: Any) -> httpx.Response:
    front = Front(handler, GatewaySettings(name="g", **settings), GatewayMetrics(), frozenset({"/v1/chat/completions"}))
    transport = httpx.ASGITransport(app=front)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        return await client.post("/v1/chat/completions", content=body, headers=headers)


async def test_a_failure_before_the_first_token_is_a_status() -> None:
    async def handler(scope: Any, receive: Any, send: Any) -> None:
        await send(SSE)
        await send(chunk("data: {begun}\n\n"))  # as the Responses API does, before there is any token
        exchanges.current().failure = LOST
        await send(chunk('data: {"error": {}}\n\n'))
        await send(chunk("data: [DONE]\n\n", more=False))

    response = await post(handler)
    assert response.status_code == 500
    assert response.headers["content-type"] == "application/json"
    assert response.json()["error"]["code"] == "engine_dead"


async def test_a_failure_after_it_is_the_last_event() -> None:
    async def handler(scope: Any, receive: Any, send: Any) -> None:
        await send(SSE)
        exchanges.current().answering = True
        await send(chunk("data: 1\n\n"))
        exchanges.current().failure = LOST
        await send(chunk('data: {"error": {}}\n\n'))
        await send(chunk("data: [DONE]\n\n", more=False))

    response = await post(handler)
    assert response.status_code == 200
    first, last, rest = response.text.split("\n\n")
    assert (first, rest) == ("data: 1", "")
    assert last.startswith("event: error\ndata: ")
    assert json.loads(last.partition("data: ")[2])["error"]["code"] == "engine_dead"


async def test_a_silent_stream_is_kept_alive_and_then_goes_on() -> None:
    go = asyncio.Event()

    async def handler(scope: Any, receive: Any, send: Any) -> None:
        async def note(message: Any) -> None:
            await send(message)

        await note(SSE)
        await go.wait()
        exchanges.current().answering = True
        await note(chunk("data: 1\n\n"))
        await note(chunk("data: [DONE]\n\n", more=False))

    sent: list[str] = []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            sent.append(message["body"].decode())
            if len(sent) == 2:
                go.set()

    front = Front(handler, GatewaySettings(name="g", keep_alive_s=0.01), GatewayMetrics(), frozenset())
    await front({"type": "http", "method": "GET", "path": "/", "headers": []}, _never, send)
    assert sent[:2] == [": keep-alive\n\n"] * 2
    assert [text for text in sent if text.startswith("data")] == ["data: 1\n\n", "data: [DONE]\n\n"]
    assert sent[-1] == "data: [DONE]\n\n"


async def test_ids_are_echoed_and_never_used() -> None:
    seen: dict[bytes, bytes] = {}

    async def handler(scope: Any, receive: Any, send: Any) -> None:
        seen.update(scope["headers"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    response = await post(handler, {"x-request-id": "mine-1", "x-data-parallel-rank": "3"})
    assert response.headers["x-request-id"] == "mine-1"
    assert seen[b"x-request-id"].decode() == response.headers["x-jetwake-request-id"] != "mine-1"
    assert b"x-data-parallel-rank" not in seen
    strange = await post(handler, {"x-request-id": "x" * 200})
    assert strange.headers["x-request-id"] == strange.headers["x-jetwake-request-id"]


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [(b'{"cache_salt": "s"}', 400, "cache_salt"), (b"x" * 2000, 413, "at most 1024")],
)
async def test_bad_bodies_never_reach_the_handler(body: bytes, status: int, words: str) -> None:
    async def handler(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("the handler was called")

    response = await post(handler, body=body, max_body_bytes=1024)
    assert response.status_code == status
    assert words in response.json()["error"]["message"]


async def test_the_handler_gets_the_body_whole_and_hears_of_the_client_leaving() -> None:
    heard: list[Any] = []

    async def handler(scope: Any, receive: Any, send: Any) -> None:
        heard.extend([await receive(), await receive()])

    parts = iter(
        [
            {"type": "http.request", "body": b"{", "more_body": True},
            {"type": "http.request", "body": b"}"},
            {"type": "http.disconnect"},
        ]
    )

    async def receive() -> Any:
        return next(parts)

    front = Front(handler, GatewaySettings(name="g"), GatewayMetrics(), frozenset())
    await front({"type": "http", "method": "POST", "path": "/", "headers": []}, receive, _never)
    assert heard == [{"type": "http.request", "body": b"{}", "more_body": False}, {"type": "http.disconnect"}]


async def _never(*_: Any) -> Any:
    raise AssertionError("not expected")
