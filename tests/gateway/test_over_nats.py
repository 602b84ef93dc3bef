"""Jetwake over NATS as a whole: vLLM's real front end behind the subjects, a real broker, simulated engines, and no Jetwake in the client."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fleet import Fleet, fleet_of
from gateway_system import RunningGateway, gateway_of
from node import node_packages
from stream_checker import check_chat

from jetwake.consumers.timing import FittedTiming
from jetwake.deploy.demo_model import fetch
from jetwake.deploy.nats_server import NatsServer
from jetwake.pipeline.connection import Bus, RawMessage
from jetwake.pipeline.jetstream import stored_messages
from jetwake.pipeline.publish import Publisher
from jetwake.pipeline.settings import BrokerSettings
from jetwake.schemas import subjects
from jetwake.schemas.codec import decode
from jetwake.schemas.replies import Finished
from jetwake.schemas.streams import EVENTS, RESULTS

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(180)]

MODEL = "sim"
SLOW = FittedTiming(0.0, 0.0, 0.0, decode_step_base_s=0.01, decode_sequence_s=0.0, decode_context_token_s=0.0)
EXAMPLES = Path(__file__).parents[2] / "deploy" / "examples"


@dataclass
class System:
    server: NatsServer
    fleet: Fleet
    gateway: RunningGateway
    bus: Bus
    tokenizer: Path

    async def ask(self, endpoint: str, fields: dict[str, Any], **headers: str) -> RawMessage:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.bus.request(subjects.openai(endpoint), json.dumps(fields).encode(), named, timeout_s=30)

    async def stream(self, endpoint: str, fields: dict[str, Any]) -> list[RawMessage]:
        inbox, queue = self.bus.new_inbox(), asyncio.Queue[RawMessage]()
        subscription = await self.bus.subscribe(inbox, queue.put_nowait)
        await self.bus.publish_with_reply(subjects.openai(endpoint), json.dumps({**fields, "stream": True}).encode(), inbox)
        heard: list[RawMessage] = []
        async with asyncio.timeout(30):
            while not heard or subjects.END_HEADER not in heard[-1].headers:
                heard.append(await queue.get())
        await subscription.unsubscribe()
        return heard

    async def terminal(self, request_id: str) -> Finished:
        [message] = await stored_messages(self.bus, RESULTS.name, subjects.results_of(request_id))
        return decode(message.data, Finished)


def chat(text: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0, **fields}


@pytest.fixture(scope="module")
async def system(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[System]:
    tokenizer = await asyncio.to_thread(fetch, "tiny")
    options: dict[str, Any] = {"tokenizer": str(tokenizer), "vocabulary_size": 2048, "max_model_len_tokens": 8192}
    async with (
        NatsServer(tmp_path_factory.mktemp("nats"), sync_always=False) as server,
        fleet_of(server.url, prefill=1, decode=1, policy="kv_aware", **options) as (fleet, _),
        gateway_of(server.url) as gateway,
        Bus.connect(BrokerSettings(url=server.url), "client") as bus,
    ):
        yield System(server, fleet, gateway, bus, tokenizer)


# ------------------------------------------------------------------------------------------------------- the same as over HTTP


async def test_an_answer_is_the_one_of_http(system: System) -> None:
    over_http = (await system.gateway.chat(MODEL)).json()
    reply = await system.ask("chat.completions", chat(), X_Request_Id="mine")
    assert json.loads(reply.data)["choices"] == over_http["choices"]
    assert reply.headers[subjects.STATUS_HEADER] == "200"
    assert reply.headers["X-Request-Id"] == "mine"
    assert reply.headers[subjects.REQUEST_HEADER] in json.loads(reply.data)["id"]
    models = json.loads((await system.bus.request(subjects.openai("models"), b"", timeout_s=30)).data)
    assert [model["id"] for model in models["data"]] == [MODEL]


async def test_a_stream_is_the_one_of_http(system: System) -> None:
    heard = await system.stream("chat.completions", chat(stream_options={"include_usage": True}))
    raw = "".join(f"data: {message.data.decode()}\n\n" for message in heard[:-1] if message.data) + "data: [DONE]\n\n"
    checked = check_chat(raw, usage=True)
    assert checked.text[0] == (await system.gateway.chat(MODEL)).json()["choices"][0]["message"]["content"]
    assert heard[-1].headers[subjects.END_HEADER] == "done"
    assert heard[0].headers[subjects.REQUEST_HEADER]


async def test_the_other_apis_speak_their_own_events(system: System) -> None:
    heard = await system.stream("messages", chat())
    kinds = [message.headers.get(subjects.EVENT_HEADER) for message in heard]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_stop", None]
    responses = await system.stream("responses", {"model": MODEL, "input": "hello", "max_output_tokens": 8})
    assert responses[0].headers[subjects.EVENT_HEADER] == "response.created"
    assert json.loads(responses[-2].data)["response"]["usage"]["output_tokens"] == 8


@pytest.mark.parametrize("fields", [{"model": "nope"}, {"temperature": -1}, {"cache_salt": "x"}, {"max_tokens": 100_000}])
async def test_refusals_are_those_of_http(system: System, fields: dict[str, Any]) -> None:
    over_http = await system.gateway.chat(**{"model": MODEL, **fields})
    assert over_http.status_code >= 400
    for reply in (await system.ask("chat.completions", chat(**fields)), (await system.stream("chat.completions", chat(**fields)))[0]):
        assert reply.headers[subjects.STATUS_HEADER] == str(over_http.status_code)
        assert json.loads(reply.data)["error"]["code"] == over_http.json()["error"]["code"]


async def test_a_deadline_in_a_header_is_kept(system: System) -> None:
    await system.fleet.stop("router-1")
    late = await asyncio.gather(system.ask("chat.completions", chat(), Jw_Timeout_S="0.3"), _router_in(system, 0.6))
    assert late[0].headers[subjects.STATUS_HEADER] == "504"


async def _router_in(system: System, wait_s: float) -> None:
    await asyncio.sleep(wait_s)
    system.fleet.start_router(policy="kv_aware")


# ------------------------------------------------------------------------------------------------------------------ events


async def test_the_end_of_a_request_is_an_event_with_all_that_was_told(system: System) -> None:
    heard: asyncio.Queue[RawMessage] = asyncio.Queue()
    subscription = await system.bus.subscribe("jw.events.>", heard.put_nowait)
    await system.bus.flush()
    reply = await system.ask("chat.completions", chat(vllm_xargs={"session_id": "s-1"}), Jw_Metadata='{"ticket": "7"}')
    message = await asyncio.wait_for(heard.get(), 10)
    event = json.loads(message.data)
    assert message.subject == f"jw.events.{MODEL}.finished"
    assert event["id"] == reply.headers[subjects.REQUEST_HEADER]
    assert (event["metadata"], event["session"], event["outcome"], event["finish_reason"]) == ({"ticket": "7"}, "s-1", "finished", "length")
    assert (event["completion_tokens"], event["prefill_worker"], event["decode_worker"]) == (8, "prefill-1", "decode-1")
    assert event["prompt_tokens"] == json.loads(reply.data)["usage"]["prompt_tokens"]
    assert 0 < event["submitted_ms"] <= event["ended_ms"]
    await subscription.unsubscribe()
    assert heard.empty(), "one event for one request"
    stored = await stored_messages(system.bus, EVENTS.name, "jw.events.>")
    assert [json.loads(each.data)["id"] for each in stored].count(event["id"]) == 1


# ----------------------------------------------------------------------------------------------------------- keys and tenants


async def test_tenants_share_no_cache_and_one_tenant_does(system: System, tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("keys:\n- {key: of-acme, tenant: acme}\n- {key: of-acme-too, tenant: acme}\n- {key: of-globex, tenant: globex}\n")
    prompt = "a long prompt, the same for everybody, with nothing in it that tells who asks. " * 12

    async def asked(gateway: RunningGateway, key: str, **fields: Any) -> tuple[int, int]:
        """Cached tokens: as they were, and as the router expected."""
        response = await gateway.chat(MODEL, prompt, {"authorization": f"Bearer {key}"}, **fields)
        assert response.status_code == 200, response.text
        ended = await system.terminal(response.headers["x-jetwake-request-id"])
        assert ended.cached_tokens == response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return ended.cached_tokens, ended.predicted_cached_tokens

    async with gateway_of(system.server.url, name="gateway-k", api_keys=file, over_nats=False) as guarded:
        assert (await guarded.chat(MODEL, prompt)).status_code == 401
        assert await asked(guarded, "of-acme") == (0, 0)
        cached, predicted = await _warm(lambda: asked(guarded, "of-acme-too"))
        assert cached == predicted > 100
        assert await asked(guarded, "of-globex") == (0, 0)
        forged = await guarded.chat(MODEL, prompt, {"authorization": "Bearer of-globex"}, cache_salt="acme")
        assert forged.status_code == 400
        assert (await system.gateway.chat(MODEL, prompt)).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "nor with nobody"


async def _warm(ask: Any) -> tuple[int, int]:
    """The router learns of what a cache holds a moment after it does."""
    async with asyncio.timeout(10):
        while True:
            cached, predicted = await ask()
            if predicted:
                return cached, predicted


async def test_quotas_count_what_was_used(system: System, tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("keys:\n- {key: k, tenant: acme, tokens_per_minute: 1000}\n")
    async with gateway_of(system.server.url, name="gateway-q", api_keys=file, over_nats=False) as gateway:
        headers = {"authorization": "Bearer k"}
        for _ in range(3):  # each may become 500 tokens, and is a few: what was not used is given back
            response = await gateway.chat(MODEL, "hello", headers, max_tokens=500, stop_token_ids=list(range(2048)))
            assert response.status_code == 200, response.text
        assert int(response.headers["x-ratelimit-remaining-tokens"]) > 300
        too_much = await gateway.chat(MODEL, "hello", headers, max_tokens=2000)
        assert (too_much.status_code, "in a minute" in too_much.text) == (400, True)
        running = [gateway.chat(MODEL, "hello", headers, max_tokens=400, stream=stream) for stream in (True, False, True, False)]
        statuses = sorted(response.status_code for response in await asyncio.gather(*running))
        assert statuses[0] == 200
        assert statuses[-1] == 429


# ------------------------------------------------------------------------------------------------------------- durable jobs


async def test_a_job_outlives_its_gateway_and_runs_once(tmp_path: Path) -> None:
    """The gateway is killed in the middle of the answer; the next one goes on where it was."""
    tokenizer = await asyncio.to_thread(fetch, "tiny")
    options: dict[str, Any] = {"tokenizer": str(tokenizer), "vocabulary_size": 2048, "max_model_len_tokens": 8192, "timing": SLOW}
    async with (
        NatsServer(tmp_path / "nats", sync_always=False) as server,
        Bus.connect(BrokerSettings(url=server.url), "client") as bus,
        fleet_of(server.url, prefill=1, decode=1, **options),
    ):
        results, chunks, sent = asyncio.Queue[RawMessage](), asyncio.Queue[RawMessage](), list[RawMessage]()
        await bus.subscribe("jw.results-out.>", results.put_nowait)
        await bus.subscribe("jw.replies.jobs.*", chunks.put_nowait)
        await bus.subscribe("jw.requests.>", sent.append)
        await bus.flush()
        headers = {subjects.RESULT_SUBJECT_HEADER: "jw.results-out.mine"}
        body = json.dumps(chat(max_tokens=400, ignore_eos=True)).encode()
        await Publisher(bus).store_bytes(subjects.openai_job("chat.completions"), body, headers=headers)
        first = _gateway_process(server.url)
        try:
            for _ in range(5):
                await asyncio.wait_for(chunks.get(), 60)
        finally:
            first.send_signal(signal.SIGKILL)
            first.wait()
        assert results.empty()
        async with gateway_of(server.url, name="gateway-2"):
            result = await asyncio.wait_for(results.get(), 60)
        answer = json.loads(result.data)
        assert answer["usage"]["completion_tokens"] == 400
        assert len(sent) == 1, "the request was on its way once"
        [terminal] = await stored_messages(bus, RESULTS.name, subjects.results_of(result.headers[subjects.REQUEST_HEADER]))
        assert decode(terminal.data, Finished).attempt == 1
        await bus.flush()
        assert results.empty()
        async with gateway_of(server.url, name="gateway-3") as gateway:
            plain = (await gateway.chat(MODEL, max_tokens=400, ignore_eos=True)).json()
        assert plain["choices"][0]["message"]["content"] == answer["choices"][0]["message"]["content"]


def _gateway_process(url: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "jetwake.deploy.cli", "gateway", "--nats-url", url, "--port", "0", "--name", "gateway-1"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


# ----------------------------------------------------------------------------------------------------------------- examples


async def run_example(*command: str, cwd: Path | None = None) -> str:
    process = await asyncio.create_subprocess_exec(*command, cwd=cwd, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT)
    async with asyncio.timeout(60):
        output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    return output.decode()


async def test_the_python_example(system: System) -> None:
    url, example = system.server.url, str(EXAMPLES / "openai_over_nats.py")
    output = await run_example(sys.executable, example, "--nats", url, "--model", MODEL, "Say something.")
    assert "is stored)" in output
    _same_words(output)


async def test_the_javascript_example(system: System, tmp_path: Path) -> None:
    folder = await asyncio.to_thread(node_packages, tmp_path, "@nats-io/transport-node@3", "@nats-io/jetstream@3")
    shutil.copy(EXAMPLES / "openai_over_nats.mjs", folder)
    output = await run_example("node", "openai_over_nats.mjs", system.server.url, MODEL, "Say something.", cwd=folder)
    assert "is stored)" in output
    _same_words(output)


def _same_words(output: str) -> None:
    """Answer, stream and job of one question are drawn at temperature 1: that each of them says something is all that can be said."""
    for name in ("answer: ", "stream: ", "job: "):
        assert name in output
        assert output.partition(name)[2].strip()


async def test_the_summarising_service(system: System) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    service = await asyncio.create_subprocess_exec(
        sys.executable, str(EXAMPLES / "summarise_documents.py"), "--nats", system.server.url, "--model", MODEL,
        stdout=asyncio.subprocess.PIPE, env=environment,
    )  # fmt: skip
    assert service.stdout is not None
    try:
        async with asyncio.timeout(60):
            assert await service.stdout.readline() == b"ready\n"
            summaries: asyncio.Queue[RawMessage] = asyncio.Queue()
            await system.bus.subscribe("docs.summary.>", summaries.put_nowait)
            await system.bus.flush()
            for name in ("report-1", "report-2"):
                await Publisher(system.bus).store_bytes(f"docs.in.{name}", f"The document {name}. ".encode() * 20)
            heard = {(message := await summaries.get()).subject: message.data for _ in range(2)}
            said = b""
            while said.count(b"cached)") < 2:
                said += await service.stdout.readline()
    finally:
        service.terminate()
        await service.wait()
    assert heard.keys() == {"docs.summary.report-1", "docs.summary.report-2"}
    assert all(heard.values())
    assert b"report-1: finished" in said
