"""Streams that break off and go on elsewhere. Two gateways, and a worker that says what the test wants, cut as the test wants."""

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_system import RunningGateway, gateway_of
from scripted_worker import Script, ScriptedWorker, scripted_model
from stream_checker import Event, check_chat, events_in

from jetwake.deploy.demo_model import fetch
from jetwake.deploy.nats_server import NatsServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(180)]

MODEL = "sim"
GRACE_S = 1.0
TEXT = "Résumé: the river ends 🌊 where the stone begins, and 日本語 goes on. "
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": [1, 2, 3]}}\n</tool_call>'
TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
ANTHROPIC_TOOL: Any = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
HELLO: Any = [{"role": "user", "content": "hello"}]
CHAT, COMPLETION, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
USAGE: Any = {"include_usage": True}


@dataclass
class System:
    worker: ScriptedWorker
    first: RunningGateway
    second: RunningGateway
    plain: RunningGateway
    ended: set[str] = field(default_factory=set[str])

    async def script(self, text: str, sizes: list[int], **options: Any) -> Script:
        script = Script(await self.worker.tokens(text), sizes, **options)
        self.worker.scripts = [script]
        return script

    def cancelled(self, event_id: str) -> bool:
        """Whether the request of this stream was cancelled so far."""
        while not self.worker.cancelled.empty():
            self.ended.add(self.worker.cancelled.get_nowait())
        return event_id.partition(":")[0] in self.ended

    async def wait_cancelled(self, event_id: str) -> None:
        async with asyncio.timeout(20):
            while not self.cancelled(event_id):
                self.ended.add(await self.worker.cancelled.get())


@pytest.fixture(scope="module")
async def system(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[System]:
    folder = Path(await asyncio.to_thread(fetch, "tiny"))
    parsers = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    async with (
        NatsServer(tmp_path_factory.mktemp("nats"), sync_always=False) as server,
        scripted_model(server.url, MODEL, folder) as worker,
    ):
        options: dict[str, Any] = {"resume_grace_s": GRACE_S, "over_nats": False}
        async with (
            gateway_of(server.url, name="gateway-1", flags=parsers, **options) as first,
            gateway_of(server.url, name="gateway-2", flags=parsers, **options) as second,
            gateway_of(server.url, name="gateway-3", **options) as plain,
        ):
            worker.http = first.http
            yield System(worker, first, second, plain)


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    asked = {"prompt": "hello"} if path == COMPLETION else {"messages": HELLO}
    return {"model": MODEL, "max_tokens": 500, "stream": True, **asked, **fields}


def shown(event: Event) -> tuple[str, str, str]:
    """But for the time at which it was made once more."""
    return event.id, event.kind, re.sub(r'"created": \d+', "", json.dumps(event.data))


def text_of(events: list[Event]) -> str:
    """All that makes the answer, however it is cut."""
    parts: list[str] = []
    for event in events:
        data = event.data or {}
        for choice in data.get("choices") or ():
            delta = choice.get("delta", {})
            parts.append(choice.get("text") or delta.get("content") or "")
            parts += [call["function"].get("arguments") or "" for call in delta.get("tool_calls") or ()]
        delta = data.get("delta") or {}
        parts.append(delta.get("text") or delta.get("partial_json") or "")
    return "".join(parts)


async def resumed(gateway: RunningGateway, event_id: str) -> list[Event]:
    request_id = event_id.partition(":")[0]
    response = await gateway.http.get(f"/v1/requests/{request_id}/stream", headers={"Last-Event-ID": event_id})
    assert response.status_code == 200, response.text
    assert response.headers["x-jetwake-request-id"] == request_id
    return events_in(response.text)


# ---------------------------------------------------------------------------------------------------- exact, wherever it is cut


@pytest.mark.parametrize(
    ("path", "fields", "text"),
    [
        (CHAT, {"tools": [TOOL], "stream_options": USAGE}, TEXT + CALL),
        (CHAT, {"tools": [TOOL], "stop": ["begins,"]}, TEXT),
        (MESSAGES, {}, TEXT),
        (MESSAGES, {"tools": [ANTHROPIC_TOOL]}, TEXT + CALL),
    ],
)
async def test_after_every_event_the_same_events_follow(system: System, path: str, fields: dict[str, Any], text: str) -> None:
    """Where parsers look at the text, events are the same one by one, though the second gateway gets all tokens at once."""
    script = await system.script(text, [3, 1, 7, 2, 5])
    whole = events_in((await system.first.http.post(path, json=body_of(path, **fields))).text)
    await asyncio.wait_for(script.ended.wait(), 10)
    assert len({event.id for event in whole}) == len(whole) > 10
    for number, event in enumerate(whole[:-1], 1):
        rest = await resumed(system.second, event.id)
        assert [one.id for one in rest] == [one.id for one in whole[number:]]
        # The id of a tool call is drawn; a client that has it hears it no second time.
        drawn = re.compile(r"(chatcmpl-tool|call|toolu)[-_][0-9a-zA-Z]+")
        assert [drawn.sub("", str(shown(one))) for one in rest] == [drawn.sub("", str(shown(one))) for one in whole[number:]]


@pytest.mark.parametrize(("path", "fields"), [(CHAT, {"stream_options": USAGE}), (COMPLETION, {"stream_options": USAGE, "echo": True})])
@pytest.mark.parametrize("seed", range(3))
async def test_after_every_event_the_same_text_follows(system: System, path: str, fields: dict[str, Any], seed: int) -> None:
    dice = random.Random(seed)
    script = await system.script(TEXT * 3, [dice.randint(1, 9) for _ in range(40)])
    whole = events_in((await system.plain.http.post(path, json=body_of(path, **fields))).text)
    await asyncio.wait_for(script.ended.wait(), 10)
    assert text_of(whole).endswith(TEXT * 3)
    for number, event in enumerate(whole[:-1], 1):
        rest = await resumed(system.plain, event.id)
        assert text_of(whole[:number]) + text_of(rest) == text_of(whole), event.id
        assert rest[-1].data is None
        assert [one.data["usage"] for one in rest if one.data and not one.data["choices"]] in ([], [whole[-2].data["usage"]])
        assert all(one.id not in {known.id for known in whole[:number]} for one in rest)
    assert await resumed(system.plain, whole[-1].id) == []


async def test_a_number_of_tokens_will_do(system: System) -> None:
    script = await system.script(TEXT, [4] * 20)
    response = await system.first.http.post(CHAT, json=body_of(CHAT))
    whole, request_id = events_in(response.text), response.headers["x-jetwake-request-id"]
    await asyncio.wait_for(script.ended.wait(), 10)
    stream = f"/v1/requests/{request_id}/stream"
    assert [shown(one) for one in events_in((await system.second.http.get(stream)).text)] == [shown(one) for one in whole]
    for tokens in range(1, len(script.tokens)):
        rest = events_in((await system.second.http.get(f"{stream}?after={tokens}")).text)
        before = [event for event in whole if int(re.findall(r":(\d+)", event.id)[0]) <= tokens and "e." not in event.id]
        assert text_of(before) + text_of(rest) == text_of(whole)


# -------------------------------------------------------------------------------------------------- connections that really break


async def broken_off(gateway: RunningGateway, path: str, body: dict[str, Any], after_events: int) -> list[Event]:
    """The events that came before the connection was closed."""
    raw = ""
    async with gateway.http.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        async for text in response.aiter_text():
            raw += text
            if len(events_in(raw.rpartition("\n\n")[0])) >= after_events:
                break
    return events_in(raw.rpartition("\n\n")[0])[:after_events]


@pytest.mark.parametrize("seed", range(4))
async def test_a_running_stream_goes_on_at_another_gateway(system: System, seed: int) -> None:
    dice = random.Random(seed)
    script = await system.script(TEXT * 4, [dice.randint(1, 6) for _ in range(60)], pause_after=40)
    body = body_of(CHAT, tools=[TOOL])
    seen = await broken_off(system.first, CHAT, body, dice.randint(1, 20))
    going_on = asyncio.create_task(
        system.second.http.post(CHAT, json=body, headers={"Last-Event-ID": seen[-1].id})
        if seed % 2
        else system.second.http.get(f"/v1/requests/{seen[-1].id.partition(':')[0]}/stream?after={seen[-1].id}")
    )
    await asyncio.sleep(GRACE_S * 1.5)  # what is waited for here is that something does not happen
    assert not system.cancelled(seen[0].id)
    script.go.set()
    rest = events_in((await going_on).text)
    assert text_of(seen) + text_of(rest) == TEXT * 4
    check_chat("".join(f"id: {one.id}\ndata: {'[DONE]' if one.data is None else json.dumps(one.data)}\n\n" for one in [*seen, *rest]))
    assert len([one for one in system.worker.requests if one.request_id == seen[0].id.partition(":")[0]]) == 1


async def test_a_resumed_stream_can_break_off_and_be_resumed(system: System) -> None:
    script = await system.script(TEXT * 4, [1] * 400, pause_after=60)
    seen = await broken_off(system.first, CHAT, body_of(CHAT), 10)
    for gateway in (system.second, system.first):
        url, have = f"/v1/requests/{seen[0].id.partition(':')[0]}/stream", len(seen)
        raw = ""
        async with gateway.http.stream("GET", url, headers={"Last-Event-ID": seen[-1].id}) as response:
            async for text in response.aiter_text():
                raw += text
                if raw.count("\n\n") > 10:
                    break
        seen += events_in(raw.rpartition("\n\n")[0])[:10]
        assert len(seen) == have + 10
    script.go.set()
    seen += await resumed(system.second, seen[-1].id)
    assert text_of(seen) == TEXT * 4
    assert not system.cancelled(seen[0].id)


async def test_a_stream_that_nobody_takes_up_is_cancelled(system: System) -> None:
    await system.script(TEXT, [1] * 100, pause_after=10)
    seen = await broken_off(system.first, CHAT, body_of(CHAT), 5)
    await system.wait_cancelled(seen[0].id)


async def test_a_resumed_stream_that_is_left_is_cancelled(system: System) -> None:
    await system.script(TEXT, [1] * 100, pause_after=10)
    seen = await broken_off(system.first, CHAT, body_of(CHAT), 5)
    url = f"/v1/requests/{seen[0].id.partition(':')[0]}/stream"
    async with system.second.http.stream("GET", url, headers={"Last-Event-ID": seen[-1].id}) as response:
        await anext(response.aiter_text())
    await system.wait_cancelled(seen[0].id)


# ------------------------------------------------------------------------------------------------------------- what is refused


def code_of(response: httpx.Response) -> tuple[int, str]:
    assert response.status_code < 500, response.text
    return response.status_code, response.json()["error"]["code"]


async def test_what_cannot_be_exact_is_refused(system: System) -> None:
    script = await system.script(TEXT, [4] * 20)
    response = await system.first.http.post(CHAT, json=body_of(CHAT))
    await asyncio.wait_for(script.ended.wait(), 10)
    last, request_id = events_in(response.text)[4].id, response.headers["x-jetwake-request-id"]
    post, get, stream = system.second.http.post, system.second.http.get, f"/v1/requests/{request_id}/stream"
    other_digest = f"{last.rpartition('.')[0]}.00000000"
    assert code_of(await get(stream, headers={"Last-Event-ID": other_digest})) == (409, "not_resumable")
    assert code_of(await get(f"{stream}?after=4000")) == (409, "not_resumable")
    assert code_of(await post(COMPLETION, headers={"Last-Event-ID": last})) == (409, "not_resumable")
    assert code_of(await post(CHAT, json=body_of(CHAT, temperature=0.5), headers={"Last-Event-ID": last})) == (409, "not_resumable")
    assert code_of(await system.plain.http.get(stream, headers={"Last-Event-ID": last})) == (409, "not_resumable")
    assert code_of(await get(f"{stream}?after=x")) == (400, "invalid_request")
    assert code_of(await post(CHAT, json=body_of(CHAT), headers={"Last-Event-ID": "what"})) == (400, "invalid_request")
    assert code_of(await get("/v1/requests/nobody/stream")) == (404, "unknown_request")
    assert code_of(await get("/v1/requests/%20x/stream")) == (400, "invalid_request")


@pytest.mark.parametrize(
    ("path", "fields"),
    [(CHAT, {"n": 2, "temperature": 1}), (COMPLETION, {"prompt": ["one", "two"]}), ("/v1/responses", {"input": "x", "messages": None})],
)
async def test_streams_that_cannot_be_resumed_have_no_ids(system: System, path: str, fields: dict[str, Any]) -> None:
    await system.script(TEXT, [4] * 20)
    body = {name: value for name, value in body_of(path, **fields).items() if value is not None}
    response = await system.first.http.post(path, json=body)
    assert response.status_code == 200
    assert not any(event.id for event in events_in(response.text))
    refused = await system.second.http.get(f"/v1/requests/{response.headers['x-jetwake-request-id']}/stream")
    assert refused.status_code in (404, 409), refused.text


async def test_an_attempt_that_is_refused_ends_nothing(system: System) -> None:
    script = await system.script(TEXT, [1] * 100, pause_after=10)
    async with system.first.http.stream("POST", CHAT, json=body_of(CHAT)) as response:
        raw = ""
        pieces = response.aiter_text()
        while raw.count("\n\n") < 5:
            raw += await anext(pieces)
        wrong = f"{events_in(raw)[3].id.rpartition('.')[0]}.00000000"
        refused = await system.second.http.get(f"/v1/requests/{wrong.partition(':')[0]}/stream", headers={"Last-Event-ID": wrong})
        assert code_of(refused) == (409, "not_resumable")
        await asyncio.sleep(GRACE_S * 1.5)
        script.go.set()
        raw += "".join([piece async for piece in pieces])
    assert text_of(events_in(raw)) == TEXT
    assert not system.cancelled(wrong)
