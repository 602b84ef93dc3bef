"""Requests over NATS: one reply, or one message for each event of a stream, from whichever gateway serves the model."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from nats_apps import EchoApp

from jetwake.pipeline.connection import Bus, RawMessage
from jetwake.pipeline.settings import BrokerSettings
from jetwake.producers.gateway.in_process import EventParser, StreamEvent
from jetwake.producers.gateway.nats_door import NatsDoor
from jetwake.schemas import subjects
from jetwake.schemas.openai_endpoints import ENDPOINTS

CHAT = subjects.openai("chat.completions")


@asynccontextmanager
async def door(url: str, *names: str, slots: int = 100) -> AsyncIterator[tuple[NatsDoor, EchoApp]]:
    async with Bus.connect(BrokerSettings(url=url), "gateway") as bus:
        app = EchoApp()
        made = NatsDoor(bus, app, names or ("m",), slots)
        await made.start()
        try:
            yield made, app
        finally:
            await made.stop(0.0)


@pytest.fixture
async def client(own_server: Any) -> AsyncIterator[Bus]:
    async with Bus.connect(BrokerSettings(url=own_server.url), "client") as bus:
        yield bus


async def ask(client: Bus, fields: Any, headers: dict[str, str] | None = None, subject: str = CHAT) -> RawMessage:
    return await client.request(subject, json.dumps(fields).encode(), headers)


async def stream(client: Bus, fields: Any) -> list[RawMessage]:
    """All messages up to the end marker."""
    inbox, queue = client.new_inbox(), asyncio.Queue[RawMessage]()
    await client.subscribe(inbox, queue.put_nowait)
    await client.publish_with_reply(CHAT, json.dumps(fields).encode(), inbox)
    heard: list[RawMessage] = []
    async with asyncio.timeout(10):
        while not heard or subjects.END_HEADER not in heard[-1].headers:
            heard.append(await queue.get())
    return heard


def test_events_are_the_same_however_they_are_cut() -> None:
    text = b'event: a\r\ndata: {"x":\r\ndata:1}\r\nid: 7\r\n\r\n: alive\n\ndata: [DONE]\n\n'
    whole = [StreamEvent("a", '{"x":\n1}', "7"), StreamEvent("", ""), StreamEvent("", "[DONE]")]
    for size in range(1, len(text) + 1):
        parser = EventParser()
        cut = [event for at in range(0, len(text), size) for event in parser.feed(text[at : at + size])]
        assert cut == whole, size


async def test_every_endpoint_reaches_its_route(own_server: Any, client: Bus) -> None:
    async with door(own_server.url):
        for endpoint in ENDPOINTS.values():
            answer = await ask(client, {"model": "m"}, {"Authorization": "Bearer k", "Cookie": "x"}, subjects.openai(endpoint.name))
            said = json.loads(answer.data)
            assert (said["path"], said["method"]) == (endpoint.path, endpoint.method)
            assert said["headers"]["authorization"] == "Bearer k"
            assert "cookie" not in said["headers"]
            assert answer.headers[subjects.STATUS_HEADER] == "200"
            assert answer.headers[subjects.REQUEST_HEADER]


async def test_a_stream_is_one_message_for_each_event_and_an_end(own_server: Any, client: Bus) -> None:
    async with door(own_server.url):
        heard = await stream(client, {"model": "m", "stream": True, "say": "one two"})
    assert [message.data for message in heard] == [b'"one"', b'"two"', b"", b""]
    assert [message.headers.get(subjects.EVENT_HEADER) for message in heard] == ["word", "word", None, None]
    assert heard[0].headers[subjects.STATUS_HEADER] == "200"
    assert heard[2].headers[subjects.KEEP_ALIVE_HEADER] == "1"
    assert heard[3].headers[subjects.END_HEADER] == "done"


async def test_errors_have_the_status_of_http(own_server: Any, client: Bus) -> None:
    async with door(own_server.url):
        answer = await ask(client, {"status": 418})
        assert (answer.headers[subjects.STATUS_HEADER], json.loads(answer.data)["error"]["message"]) == ("418", "no")
        for headers, word in (({"Jw-Timeout-S": "-1"}, "Jw-Timeout-S"), ({"Jw-Metadata": "[1]"}, "metadata")):
            refused = await ask(client, {}, headers)
            assert refused.headers[subjects.STATUS_HEADER] == "400"
            assert word in json.loads(refused.data)["error"]["message"]


async def test_what_the_headers_say_is_in_the_exchange(own_server: Any, client: Bus) -> None:
    async with door(own_server.url) as (_, app):
        await ask(client, {}, {"Jw-Timeout-S": "1.5", "Jw-Metadata": '{"ticket": "7"}'})
        assert (app.exchanges[0].timeout_s, app.exchanges[0].metadata) == (1.5, {"ticket": "7"})


async def test_a_request_is_served_by_one_of_its_models_gateways(own_server: Any, client: Bus) -> None:
    async with (
        door(own_server.url, "a") as (_, one),
        door(own_server.url, "a") as (_, two),
        door(own_server.url, "b/c", "alias") as (_, other),
    ):
        for number in range(30):
            await ask(client, {"model": ("a", "b/c", "alias")[number % 3]})
        assert one.calls + two.calls == 10
        assert other.calls == 20
        await ask(client, {"model": "nobody's"})
        assert one.calls + two.calls + other.calls == 31, "the application says that there is no such model"


async def test_a_cancelled_request_ends_and_is_told_so(own_server: Any, client: Bus) -> None:
    async with door(own_server.url) as (_, app):
        asked = asyncio.create_task(client.request(CHAT, b'{"hold": true}', timeout_s=10))
        await app.waiting.wait()
        await client.publish(subjects.cancel("another"), b"")
        await client.publish(subjects.cancel(app.exchanges[0].request_id), b"")
        answer = await asked
        assert answer.headers[subjects.STATUS_HEADER] == "409"
        assert json.loads(answer.data)["error"]["code"] == "cancelled"
        assert app.left == 1


async def test_more_than_it_can_hold_is_429(own_server: Any, client: Bus) -> None:
    async with door(own_server.url, slots=1) as (_, app):
        held = asyncio.create_task(client.request(CHAT, b'{"hold": true}', timeout_s=10))
        await app.waiting.wait()
        refused = await ask(client, {})
        assert (refused.headers[subjects.STATUS_HEADER], refused.headers["Retry-After"]) == ("429", "1")
        app.go.set()
        assert (await held).headers[subjects.STATUS_HEADER] == "200"


async def test_a_gateway_that_stops_answers_what_it_has(own_server: Any, client: Bus) -> None:
    async with door(own_server.url) as (made, app):
        held = asyncio.create_task(client.request(CHAT, b'{"hold": true}', timeout_s=10))
        await app.waiting.wait()
        await made.stop(0.0)
        assert (await held).headers[subjects.STATUS_HEADER] == "503"


async def test_an_answer_that_no_message_can_carry_is_413(own_server: Any, client: Bus) -> None:
    async with door(own_server.url):
        large = "x" * (client.max_payload_bytes - 100)
        answer = await client.request(CHAT, json.dumps({"say": large}).encode(), timeout_s=10)
        assert answer.headers[subjects.STATUS_HEADER] == "413"
        assert json.loads(answer.data)["error"]["code"] == "payload_too_large"
