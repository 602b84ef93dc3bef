"""The whole gateway over HTTP: vLLM's real front end, a real broker, and simulated engines with the tokenizer of `tiny`."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic import AsyncAnthropic
from fleet import Fleet, fleet_of
from gateway_system import RunningGateway, gateway_of
from openai import AsyncOpenAI
from scripted_worker import Script, scripted_model
from stream_checker import check_chat, check_completion, events_in

from jetwake.consumers.timing import DYNAMO_DEFAULT as SLOW
from jetwake.deploy.demo_model import fetch
from jetwake.deploy.nats_server import NatsServer
from jetwake.pipeline.connection import Bus
from jetwake.pipeline.raw import RawMessage
from jetwake.pipeline.settings import BrokerSettings, TopologySettings
from jetwake.pipeline.topology import ensure_topology, purge
from jetwake.schemas.codec import decode
from jetwake.schemas.replies import Finished, Reply
from jetwake.schemas.streams import REQUESTS
from jetwake.schemas.subjects import CANCELS, last_token, replies_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(120)]

MODEL = "sim"
LIMIT = 400_000
KEEP_ALIVE_S = 0.1
ANY_REPLY: Any = Reply


@dataclass
class System:
    server: NatsServer
    fleet: Fleet
    gateway: RunningGateway


@pytest.fixture(scope="module")
async def system(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[System]:
    tokenizer = await asyncio.to_thread(fetch, "tiny")
    options: dict[str, Any] = {"tokenizer": str(tokenizer), "vocabulary_size": 2048, "max_model_len_tokens": LIMIT, "num_blocks": 60_000}
    flags = ("--served-model-name", "sim", "alias")
    async with (
        NatsServer(tmp_path_factory.mktemp("nats"), sync_always=False, max_payload_bytes=1 << 20) as server,
        fleet_of(server.url, prefill=1, decode=1, **options) as (fleet, _),
        gateway_of(server.url, keep_alive_s=KEEP_ALIVE_S, resume_grace_s=0.2, flags=flags) as gateway,
    ):
        yield System(server, fleet, gateway)


@pytest.fixture
def gateway(system: System) -> RunningGateway:
    return system.gateway


# ------------------------------------------------------------------------------------------------------------------ answers


async def test_a_streamed_answer_is_the_plain_one(gateway: RunningGateway) -> None:
    plain = (await gateway.chat(MODEL)).json()
    streamed = await gateway.chat(MODEL, stream=True, stream_options={"include_usage": True})
    checked = check_chat(streamed.text, usage=True)
    assert checked.text[0] == plain["choices"][0]["message"]["content"]
    assert checked.finish_reasons == {0: plain["choices"][0]["finish_reason"]} == {0: "length"}
    assert checked.usage is not None
    assert checked.usage["completion_tokens"] == plain["usage"]["completion_tokens"] == 8
    check_chat((await gateway.chat(MODEL, stream=True)).text)
    assert check_completion((await gateway.completion(MODEL, stream=True)).text).text


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}}
PARTS = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
SHORT_AND_LONG: tuple[dict[str, Any], ...] = (
    {},
    {"n": 2, "seed": 3, "temperature": 1, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"logprobs": True, "top_logprobs": 2, "stop": ["zzz"], "ignore_eos": True, "max_completion_tokens": 5, "return_token_ids": True},
    {"messages": [{"role": "system", "content": "é \U0001f600"}, {"role": "user", "content": PARTS}], "echo": True},
    {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "tool_calls": [CALL]},
            {"role": "tool", "content": "b", "tool_call_id": "c1"},
        ]
    },
    {"tools": [TOOL], "tool_choice": "none"},
    {"tools": [TOOL]},
    {"response_format": {"type": "json_object"}},
    {"temperature": "hot"},
    {"temperature": -1},
    {"messages": []},
    {"messages": "hello"},
    {"model": "nobody"},
    {"max_tokens": 0},
    {"n": 0},
    {"unknown_field": 1},
    {"top_logprobs": 2},
    {"stream_options": {"include_usage": "maybe"}},
)


@pytest.mark.parametrize("fields", SHORT_AND_LONG)
async def test_streamed_chat_is_the_same_by_the_short_way_and_by_the_long(gateway: RunningGateway, fields: dict[str, Any]) -> None:
    """`"stream": 1` means the same to vLLM, and is none of what the short way takes."""
    model = fields.get("model", MODEL)
    rest = {name: value for name, value in fields.items() if name != "model"}
    short, long = [await gateway.chat(model, stream=stream, **rest) for stream in (True, 1)]
    assert short.status_code == long.status_code
    own = ("x-request-id", "x-jetwake-request-id", "date", "content-length")
    assert [head for head in short.headers.items() if head[0] not in own] == [head for head in long.headers.items() if head[0] not in own]
    assert _said(short) == _said(long)
    assert (short.status_code, "data: [DONE]" in short.text) in ((200, True), (400, False), (404, False))


def _said(response: httpx.Response) -> Any:
    """Without what is each response's own: ids, times, and where chance has cut the tokens."""
    if not response.headers["content-type"].startswith("text/event-stream"):
        return response.json()
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    choices = [choice for event in events for choice in event.pop("choices", ())]
    said: dict[str, Any] = {"heads": {json.dumps(event | {"id": "", "created": 0, "usage": 0}) for event in events}}
    said["usage"] = [event["usage"] for event in events if event.get("usage")][-1:]
    for choice in sorted(choices, key=lambda choice: choice["index"]):
        delta, index = choice.pop("delta"), choice["index"]
        said.setdefault(f"text {index}", []).append(delta.pop("content", ""))
        said.setdefault(f"tokens {index}", []).extend(choice.pop("token_ids", None) or ())
        said.setdefault(f"logprobs {index}", []).extend((choice.pop("logprobs", None) or {}).get("content", ()))
        said.setdefault("rest", set()).add(json.dumps([choice, delta]))
    return {name: "".join(value) if name.startswith("text") else value for name, value in said.items()}


async def test_the_model_answers_to_all_its_names(gateway: RunningGateway) -> None:
    names = [model["id"] for model in (await gateway.http.get("/v1/models")).json()["data"]]
    assert names == ["sim", "alias"]
    assert (await gateway.chat("alias")).json()["choices"] == (await gateway.chat("sim")).json()["choices"]


async def test_cached_tokens_are_those_of_the_prefill_worker(gateway: RunningGateway) -> None:
    prompt = "a prompt of its own, long enough for some blocks. " * 10

    async def cached(**fields: Any) -> int:
        response = await gateway.chat(MODEL, prompt, **fields)
        if fields.get("stream"):
            usage = check_chat(response.text, usage=True).usage
            assert usage is not None
            return usage["prompt_tokens_details"]["cached_tokens"]
        return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert await cached() == 0
    warm = await cached()
    assert warm > 100
    assert await cached(stream=True, stream_options={"include_usage": True}) == warm


async def test_n_answers_cost_one_prefill(system: System) -> None:
    ended: list[Finished] = []

    def note(message: RawMessage) -> None:
        reply: Any = decode(message.data, ANY_REPLY)
        if isinstance(reply, Finished):
            ended.append(reply)

    prompt = "another prompt that nobody has asked before. " * 10
    async with Bus.connect(BrokerSettings(url=system.server.url), "listener") as bus:
        await bus.subscribe(replies_of("gateway-t"), note)
        await bus.flush()
        response = await system.gateway.completion(MODEL, prompt, n=4, temperature=1, stream=True, stream_options={"include_usage": True})
        plain = (await system.gateway.chat(MODEL, prompt, n=3, temperature=1)).json()
        async with asyncio.timeout(10):
            while len(ended) < 7:
                await asyncio.sleep(0.01)
    checked = check_completion(response.text, choices=4, usage=True)
    assert checked.usage is not None
    length = checked.usage["prompt_tokens"]
    assert checked.usage["completion_tokens"] == 4 * 8
    assert [choice["index"] for choice in plain["choices"]] == [0, 1, 2]
    computed = [reply.prompt_length_tokens - reply.cached_tokens for reply in ended]
    assert computed[0] == length > 100
    assert max(computed[1:4]) <= 16, "the others compute at most the last block"
    assert max(computed[5:7]) <= 16


async def test_n_answers_go_on_where_the_worker_of_some_died(own_server: NatsServer) -> None:
    """The same four, by the same seed, from a fleet that nothing happens to and from one whose decode worker dies in the middle of them."""
    tokenizer = await asyncio.to_thread(fetch, "tiny")
    options: dict[str, Any] = {"tokenizer": str(tokenizer), "vocabulary_size": 2048, "timing": SLOW}
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "x"}],
        "n": 4,
        "seed": 5,
        "temperature": 1,
        "max_tokens": 150,
        "stream": True,
    }
    attempts: list[int] = []
    async with (
        fleet_of(own_server.url, prefill=1, decode=2, **options) as (fleet, _),
        gateway_of(own_server.url, name="gateway-n") as gateway,
        Bus.connect(BrokerSettings(url=own_server.url), "listener") as bus,
    ):

        def note(message: RawMessage) -> None:
            reply: Any = decode(message.data, ANY_REPLY)
            if isinstance(reply, Finished):
                attempts.append(reply.attempt)

        async def ask(is_disturbed: bool) -> dict[int, str]:
            raw = ""
            async with gateway.http.stream("POST", "/v1/chat/completions", json=body) as response:
                async for text in response.aiter_text():
                    raw += text
                    running = fleet.engines["decode-1"].stats().running_requests
                    if (
                        is_disturbed
                        and "decode-1" in fleet.names
                        and running
                        and all(f'"index":{n},"delta":{{"content"' in raw for n in range(4))
                    ):
                        await fleet.kill("decode-1")
            return check_chat(raw, choices=4).text

        undisturbed = await ask(is_disturbed=False)
        await bus.subscribe(replies_of("gateway-n"), note)
        await bus.flush()
        assert await ask(is_disturbed=True) == undisturbed
        async with asyncio.timeout(10):
            while len(attempts) < 4:
                await asyncio.sleep(0.01)
        assert max(attempts) > 1


async def test_seeds_of_n_answers_differ_as_in_vllm(gateway: RunningGateway) -> None:
    three = (await gateway.chat(MODEL, n=3, temperature=1, seed=5)).json()["choices"]
    for number, choice in enumerate(three):
        alone = (await gateway.chat(MODEL, temperature=1, seed=5 + number)).json()["choices"][0]
        assert choice["message"]["content"] == alone["message"]["content"]


async def test_several_prompts_and_token_ids(gateway: RunningGateway) -> None:
    both = (await gateway.completion(MODEL, ["one", "two"])).json()["choices"]
    apart = [(await gateway.completion(MODEL, prompt)).json()["choices"][0]["text"] for prompt in ("one", "two")]
    assert [choice["text"] for choice in both] == apart
    tokens = (await gateway.http.post("/tokenize", json={"model": MODEL, "prompt": "one"})).json()["tokens"]
    assert (await gateway.completion(MODEL, tokens)).json()["choices"][0]["text"] == apart[0]


async def test_log_probabilities_have_one_entry_for_each_token(gateway: RunningGateway) -> None:
    plain = (await gateway.chat(MODEL, logprobs=True, top_logprobs=3)).json()["choices"][0]["logprobs"]["content"]
    assert len(plain) == 8
    for position in plain:
        values = [entry["logprob"] for entry in position["top_logprobs"]]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert position["token"] == position["top_logprobs"][0]["token"]
    streamed = check_chat((await gateway.chat(MODEL, logprobs=True, top_logprobs=3, stream=True)).text)
    assert [entry for chunk in streamed.chunks for entry in (chunk["choices"][0].get("logprobs") or {}).get("content", [])] == plain


async def test_one_client_id_for_fifty_requests_mixes_nothing_up(gateway: RunningGateway) -> None:
    alone = [(await gateway.chat(MODEL, f"number {number}")).json() for number in range(50)]
    headers = {"x-request-id": "the-same"}
    together = await asyncio.gather(*(gateway.chat(MODEL, f"number {number}", headers=headers) for number in range(50)))
    assert [response.json()["choices"] for response in together] == [answer["choices"] for answer in alone]
    assert {response.headers["x-request-id"] for response in together} == {"the-same"}
    assert len({response.headers["x-jetwake-request-id"] for response in together}) == 50
    assert all(response.headers["x-jetwake-request-id"] in response.json()["id"] for response in together)


# ----------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "status", "code", "param"),
    [
        ({"model": "nope"}, 404, "unknown_model", "model"),
        ({"temperature": -1}, 400, "invalid_request", "temperature"),
        ({"kv_transfer_params": {}}, 400, "invalid_request", "kv_transfer_params"),
        ({"max_tokens": LIMIT + 1}, 400, "invalid_request", "max_tokens"),
        ({"logit_bias": {"99999": 1}}, 400, "invalid_request", "logit_bias"),
        ({"thinking_token_budget": 3}, 400, "invalid_request", None),
        ({"bad_words": ["x"]}, 400, "engine_refused", None),  # said by the worker, when the request was on its way already
    ],
)
async def test_refusals_are_statuses_streamed_or_not(
    gateway: RunningGateway, stream: bool, fields: dict[str, Any], status: int, code: str, param: str | None
) -> None:
    response = await gateway.chat(**{"model": MODEL, "stream": stream, **fields})
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["code"] == code
    assert param is None or error["param"] == param


async def test_long_prompts_pass_and_longer_ones_get_413_with_both_sizes(gateway: RunningGateway) -> None:
    fits = await gateway.completion(MODEL, [7] * 200_000)
    assert fits.status_code == 200, fits.text
    too_large = await gateway.completion(MODEL, [7] * 300_000, stream=True)
    assert too_large.status_code == 413
    error = too_large.json()["error"]
    assert error["code"] == "payload_too_large"
    assert "300000 tokens" in error["message"]
    assert str(1 << 20) in error["message"]


async def test_only_what_works_is_served(gateway: RunningGateway) -> None:
    for path in (
        "/v1/embeddings",
        "/score",
        "/v1/load_lora_adapter",
        "/sleep",
        "/start_profile",
        "/collective_rpc",
        "/invocations",
        "/pooling",
    ):
        assert (await gateway.http.post(path, json={})).status_code == 404, path
    for path in ("/metrics", "/health", "/ping", "/docs", "/load"):
        assert (await gateway.http.get(path)).status_code == 404, path
    assert (await gateway.http.get("/version")).status_code == 200
    text = (await gateway.http.post("/detokenize", json={"model": MODEL, "tokens": [500, 501]})).json()["prompt"]
    assert isinstance(text, str)


async def test_metrics_and_health_are_on_the_admin_port(gateway: RunningGateway) -> None:
    await gateway.chat(MODEL)
    await gateway.http.get("/some/path/nobody/serves")
    metrics = (await gateway.admin.get("/metrics")).text
    assert 'jetwake_gateway_responses_total{route="/v1/chat/completions",status="200"}' in metrics
    assert "path/nobody" not in metrics
    gen_ai = f'gen_ai_operation_name="text_completion",gen_ai_provider_name="jetwake",gen_ai_request_model="{MODEL}"'
    assert f"gen_ai_server_time_to_first_token_seconds_count{{{gen_ai}}}" in metrics
    assert f'jetwake_request_stage_duration_seconds_count{{model="{MODEL}",stage="delivery"}}' in metrics
    assert (await gateway.admin.get("/health")).status_code == 200
    assert (await gateway.admin.get("/ready")).status_code == 200
    assert (await gateway.admin.get("/v1/models")).status_code == 404


# ------------------------------------------------------------------------------------------------------- waiting and leaving


@asynccontextmanager
async def kept_waiting(system: System, **options: Any) -> AsyncGenerator[AsyncIterator[str]]:
    """What comes of a streamed chat. Leaving it leaves the request."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 8, "stream": True, **options}
    async with system.gateway.http.stream("POST", "/v1/chat/completions", json=body) as response:
        yield response.aiter_text()


async def test_a_waiting_stream_is_kept_alive_and_then_served(system: System) -> None:
    await system.fleet.stop("router-1")
    async with kept_waiting(system) as lines:
        raw = ""
        while raw.count(": keep-alive\n\n") < 5:
            raw += await anext(lines)
        assert not raw.replace(": keep-alive\n\n", "")
        system.fleet.start_router()
        raw += "".join([text async for text in lines])
    check_chat(raw)


async def test_official_clients_read_over_the_signs_of_life(own_server: NatsServer) -> None:
    """Several before the first token, and several between two events: the client that had the first ones waits for more."""
    source = Path(await asyncio.to_thread(fetch, "tiny"))
    async with (
        scripted_model(own_server.url, MODEL, source) as worker,
        gateway_of(own_server.url, name="gateway-o", over_nats=False, keep_alive_s=0.05) as gateway,
        relay(gateway.url) as (url, signs),
        AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client,
        AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key="none", max_retries=0) as other,
    ):
        worker.http = gateway.http
        tokens = await worker.tokens("The river ends where the stone begins.")
        said: Any = [{"role": "user", "content": "x"}]

        async def read(pause_after: int, asked: Awaitable[Any]) -> list[Any]:
            script = Script(tokens, [1] * len(tokens), pause_after=pause_after)
            worker.scripts, seen = [script], signs.total()
            async with asyncio.TaskGroup() as tasks:
                reading = tasks.create_task(all_of(asked))
                while signs.total() < seen + 3:
                    await asyncio.sleep(0.01)
                script.go.set()
            return reading.result()

        for pause_after in (0, 4):
            chat = await read(pause_after, client.chat.completions.create(model=MODEL, messages=said, stream=True))
            assert chat[-1].choices[0].finish_reason == "stop"
            completion = await read(pause_after, client.completions.create(model=MODEL, prompt="x", stream=True))
            assert completion[-1].choices[0].finish_reason == "stop"
            response = await read(pause_after, client.responses.create(model=MODEL, input="x", stream=True))
            assert response[-1].type == "response.completed"
            message = await read(pause_after, other.messages.create(model=MODEL, messages=said, max_tokens=50, stream=True))
            assert message[-1].type == "message_stop"


@asynccontextmanager
async def relay(url: str) -> AsyncGenerator[tuple[str, Counter[str]]]:
    """Another way to a gateway, that counts the signs of life that come by."""
    signs: Counter[str] = Counter()
    target = httpx.URL(url)

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while part := await reader.read(1 << 16):
                signs["heard"] += part.count(b": keep-alive")
                writer.write(part)
        finally:
            writer.close()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(target.host, target.port)
        await asyncio.gather(pass_on(reader, back), pass_on(there, writer))

    async with await asyncio.start_server(take, "127.0.0.1", 0) as server:
        yield str(target.copy_with(port=server.sockets[0].getsockname()[1])), signs


async def all_of(asked: Awaitable[Any]) -> list[Any]:
    return [event async for event in await asked]


async def test_a_failure_after_the_first_byte_is_the_last_event(system: System) -> None:
    await system.fleet.stop("router-1")
    async with kept_waiting(system, bad_words=["x"]) as lines:
        raw = await anext(lines)
        assert raw.startswith(": keep-alive")
        system.fleet.start_router()
        raw += "".join([text async for text in lines])
    checked = check_chat(raw)
    assert checked.error is not None
    assert checked.error["code"] == "engine_refused"
    assert not checked.finish_reasons


async def requests_stored(bus: Bus) -> "asyncio.Queue[str]":
    """The subjects of those that come from now on."""
    stored: asyncio.Queue[str] = asyncio.Queue()
    await bus.subscribe("jw.requests.>", lambda message: stored.put_nowait(message.subject))
    await bus.flush()
    return stored


async def test_a_request_that_the_broker_lost_ends_a_little_after_its_deadline(system: System) -> None:
    """Nobody holds it any more, so nobody could tell of its end."""
    await system.fleet.stop("router-1")
    async with (
        gateway_of(system.server.url, name="gateway-l", model=MODEL, request_timeout_s=0.5) as short,
        Bus.connect(BrokerSettings(url=system.server.url), "operator") as bus,
    ):
        stored = await requests_stored(bus)
        asked = asyncio.create_task(short.chat(MODEL))
        await asyncio.wait_for(stored.get(), 10)
        await purge(bus, REQUESTS.name, "jw.requests.>")
        answer = await asked
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    system.fleet.start_router()
    assert (await system.gateway.chat(MODEL)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels(system: System, stream: bool) -> None:
    await system.fleet.stop("router-1")
    cancelled: asyncio.Queue[str] = asyncio.Queue()
    async with Bus.connect(BrokerSettings(url=system.server.url), "listener") as bus:
        await bus.subscribe(CANCELS, lambda message: cancelled.put_nowait(message.subject))
        stored = await requests_stored(bus)
        if stream:
            async with kept_waiting(system) as lines:
                assert await anext(lines) == ": keep-alive\n\n"
        else:
            asked = asyncio.create_task(system.gateway.chat(MODEL))
            await asyncio.wait_for(stored.get(), 10)
            asked.cancel()
        subject = await asyncio.wait_for(cancelled.get(), 10)
        assert len(last_token(subject)) == 32
    system.fleet.start_router()
    assert (await system.gateway.chat(MODEL)).status_code == 200


async def test_a_full_queue_is_429_with_retry_after(system: System) -> None:
    await system.fleet.stop("router-1")
    async with Bus.connect(BrokerSettings(url=system.server.url), "operator") as bus:
        await ensure_topology(bus, TopologySettings(max_requests=1))
        stored = await requests_stored(bus)
        waiting = asyncio.create_task(system.gateway.chat(MODEL, stream=True))
        await asyncio.wait_for(stored.get(), 10)
        for stream in (True, False):
            refused = await system.gateway.chat(MODEL, stream=stream)
            assert refused.status_code == 429, refused.text
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["code"] == "overloaded"
        assert (await system.gateway.admin.get("/ready")).status_code == 503
        await ensure_topology(bus, TopologySettings())
    system.fleet.start_router()
    check_chat((await waiting).text)


async def test_no_broker_is_503_with_retry_after_and_heals(system: System) -> None:
    await system.server.kill()
    try:
        async with asyncio.timeout(20):
            while (refused := await system.gateway.chat(MODEL)).status_code != 503:
                await asyncio.sleep(0.05)
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "broker_unavailable"
    finally:
        await system.server.restart()
    async with asyncio.timeout(60):
        while (await system.gateway.chat(MODEL)).status_code != 200:
            await asyncio.sleep(0.1)


# --------------------------------------------------------------------------------------------------------------- other APIs


async def test_responses_and_messages_stream_their_own_events(gateway: RunningGateway) -> None:
    body = {"model": MODEL, "input": "hello", "max_output_tokens": 4, "stream": True}
    responses = [event.kind for event in events_in((await gateway.http.post("/v1/responses", json=body)).text)]
    assert responses[0] == "response.created"
    assert responses[-1] == "response.completed"
    messages = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "stream": True}
    kinds = [event.kind for event in events_in((await gateway.http.post("/v1/messages", json=messages)).text)]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")


async def test_their_failures_have_their_shape(gateway: RunningGateway) -> None:
    unknown = await gateway.http.post(
        "/v1/messages", json={"model": "nope", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    )
    assert unknown.status_code == 404
    assert unknown.json()["type"] == "error"
    stopped = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "stream": True, "stop_sequences": ["x"]}
    refused = await gateway.http.post("/v1/messages", json=stopped)
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")


def read(path: Path) -> Any:
    return json.loads(path.read_text())


async def test_the_url_is_told_in_a_file(system: System, tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    async with gateway_of(system.server.url, name="gateway-u", ready_file=ready, model=MODEL) as second:
        async with asyncio.timeout(10):
            while not ready.exists():
                await asyncio.sleep(0.02)
        assert read(ready)["url"] == second.url
        async with httpx.AsyncClient() as http:
            assert (await http.get(f"{read(ready)['admin_url']}/health")).status_code == 200


def test_what_vllm_counts_for_itself_is_not_in_the_way_of_a_request() -> None:
    from fastapi import FastAPI
    from prometheus_fastapi_instrumentator import Instrumentator

    from jetwake.producers.gateway.application import drop_unused_middleware

    app = FastAPI()
    Instrumentator().instrument(app)
    app.middleware_stack = app.build_middleware_stack()  # as vLLM's own start does
    assert "PrometheusInstrumentatorMiddleware" in layers_of(app)
    drop_unused_middleware(app)
    assert "PrometheusInstrumentatorMiddleware" not in layers_of(app)


def layers_of(app: Any) -> list[str]:
    layer, names = app.middleware_stack, list[str]()
    while layer is not None:
        names.append(type(layer).__name__)
        layer = getattr(layer, "app", None)
    return names
