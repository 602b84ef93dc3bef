"""The official JavaScript client against a gateway. Behind it, a worker that says what the case needs."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from gateway_system import gateway_of
from node import node_packages, run_node
from scripted_worker import Script, ScriptedWorker, scripted_model

from jetwake.deploy.demo_model import fetch
from jetwake.deploy.nats_server import NatsServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(180)]

MODEL = "sim"
TEXT = "The river ends 🌊 where the stone begins."
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@dataclass
class Js:
    folder: Path
    url: str
    worker: ScriptedWorker

    async def run(self, case: str, *texts: str, **options: Any) -> Any:
        self.worker.scripts = [Script(await self.worker.tokens(text), [1, 2, 3, 1], **options) for text in texts]
        return json.loads(await run_node(self.folder, "openai_client.mjs", self.url, MODEL, case))


@pytest.fixture(scope="module")
async def js(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Js]:
    folder = await asyncio.to_thread(node_packages, tmp_path_factory.mktemp("node"), "openai@6")
    (folder / "openai_client.mjs").write_text((Path(__file__).parent / "openai_client.mjs").read_text())
    source = Path(await asyncio.to_thread(fetch, "tiny"))
    flags = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    async with (
        NatsServer(tmp_path_factory.mktemp("nats"), sync_always=False) as server,
        scripted_model(server.url, MODEL, source) as worker,
        gateway_of(server.url, over_nats=False, keep_alive_s=0.1, resume_grace_s=0.2, flags=flags) as gateway,
    ):
        worker.http = gateway.http
        yield Js(folder, gateway.url, worker)


async def test_chat(js: Js) -> None:
    said = await js.run("chat", TEXT)
    assert (said["text"], said["finish"]) == (TEXT, "stop")
    assert said["usage"]["completion_tokens"] == len(js.worker.scripts[0].tokens)
    assert said["id"] == js.worker.requests[-1].request_id


async def test_a_stream(js: Js) -> None:
    said = await js.run("stream", TEXT)
    assert (said["text"], said["ends"]) == (TEXT, ["stop"])
    assert said["usage"]["completion_tokens"] == len(js.worker.scripts[0].tokens)


async def test_a_stream_that_waits_and_is_kept_alive(js: Js) -> None:
    tokens = await js.worker.tokens(TEXT)
    first, second = Script(tokens, [1, 2, 3, 1], pause_after=3), Script(tokens, [1, 2, 3, 1])
    js.worker.scripts = [first, second]
    running = asyncio.create_task(run_node(js.folder, "openai_client.mjs", js.url, MODEL, "waiting"))
    await asyncio.wait({running, asyncio.create_task(second.ended.wait())}, return_when=asyncio.FIRST_COMPLETED)
    first.go.set()
    assert json.loads(await running) == {"text": TEXT}


async def test_the_stream_helper(js: Js) -> None:
    assert await js.run("helper", TEXT) == {"text": TEXT}


async def test_an_agent_loop(js: Js) -> None:
    said = await js.run("tools", CALL, TEXT)
    assert said == {"text": TEXT, "asked": [{"city": "Paris"}], "roles": ["user", "assistant", "tool", "assistant"]}


async def test_completions_models_and_responses(js: Js) -> None:
    assert await js.run("legs", TEXT) == {"text": TEXT, "models": [MODEL], "said": TEXT}


async def test_streamed_responses(js: Js) -> None:
    said = await js.run("events", TEXT)
    assert said["text"] == TEXT
    assert (said["kinds"][0], said["kinds"][-1]) == ("response.created", "response.completed")


async def test_refusals_are_its_own_errors(js: Js) -> None:
    said = await js.run("errors", TEXT)
    assert all(one["ours"] for one in said.values())
    assert (said["unknown"]["kind"], said["unknown"]["status"], said["unknown"]["code"]) == ("NotFoundError", 404, "unknown_model")
    assert (said["wrong"]["kind"], said["wrong"]["status"], said["wrong"]["param"]) == ("BadRequestError", 400, "temperature")


async def test_a_stream_that_fails_is_no_success(js: Js) -> None:
    said = await js.run("broken", TEXT, failure="the engine died")
    assert said["ours"], said
    assert "the engine died" in said["text"]


async def test_a_stream_that_is_left_is_cancelled(js: Js) -> None:
    await js.run("left", TEXT, pause_after=5)
    request_id = js.worker.requests[-1].request_id
    async with asyncio.timeout(20):
        while await js.worker.cancelled.get() != request_id:
            """Of earlier cases."""
