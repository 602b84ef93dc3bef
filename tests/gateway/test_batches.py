"""Files and batches through the official client: a gateway over simulated engines with a real tokenizer, and what its end leaves behind."""

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from fleet import Fleet, fleet_of
from gateway_system import gateway_of
from openai import AsyncOpenAI
from openai.types import Batch
from operations import cards_live_long

from jetwake.deploy.demo_model import fetch
from jetwake.deploy.nats_server import NatsServer
from jetwake.pipeline.connection import Bus
from jetwake.pipeline.settings import BrokerSettings
from jetwake.pipeline.topology import subject_counts
from jetwake.producers.batches.settings import BatchSettings
from jetwake.schemas import subjects
from jetwake.schemas.codec import decode
from jetwake.schemas.requests import InferenceRequest
from jetwake.schemas.streams import BATCH_LINES

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(180)]

MODEL = "sim"
ENDED = {"completed", "failed", "expired", "cancelled"}


def a_line(custom_id: str, text: str = "hello", **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 4, "temperature": 0, **fields}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def jsonl(lines: list[Any]) -> bytes:
    return b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)


@dataclass
class System:
    server: NatsServer
    fleet: Fleet
    client: AsyncOpenAI

    async def start(self, lines: list[Any], endpoint: Any = "/v1/chat/completions", window: Any = "24h", **options: Any) -> Batch:
        file = await self.client.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
        return await self.client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window=window, **options)

    async def end_of(self, batch: Batch) -> Batch:
        while (found := await self.client.batches.retrieve(batch.id)).status not in ENDED:
            await asyncio.sleep(0.1)
        return found

    async def lines_of(self, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        return [json.loads(line) for line in (await self.client.files.content(file_id)).text.splitlines()]


@pytest.fixture(scope="module")
async def system(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[System]:
    tokenizer = await asyncio.to_thread(fetch, "tiny")
    options: dict[str, Any] = {"tokenizer": str(tokenizer), "vocabulary_size": 2048}
    async with (
        NatsServer(tmp_path_factory.mktemp("nats"), sync_always=False) as server,
        fleet_of(server.url, prefill=1, decode=1, **options) as (fleet, _),
        gateway_of(server.url, batches=BatchSettings(max_file_bytes=200_000)) as gateway,
        AsyncOpenAI(base_url=gateway.url, api_key="none", max_retries=0) as client,
    ):
        yield System(server, fleet, client)


# ------------------------------------------------------------------------------------------------------------------- files


async def test_files_are_kept_listed_read_and_deleted(system: System) -> None:
    files = system.client.files
    data = os.urandom(70_000)
    made = [await files.create(file=(f"{number}.jsonl", data), purpose="batch") for number in range(3)]
    assert (made[0].bytes, made[0].filename, made[0].purpose) == (len(data), "0.jsonl", "batch")
    assert made[0].expires_at is not None
    assert await files.retrieve(made[1].id) == made[1]
    assert (await files.content(made[1].id)).content == data
    listed = [file.id async for file in files.list(limit=2, order="asc")]
    assert [file_id for file_id in listed if file_id in {file.id for file in made}]
    assert len(set(listed)) == len(listed) >= 3
    assert set(listed) == {file.id async for file in files.list(limit=2)}
    assert (await files.delete(made[2].id)).deleted
    with pytest.raises(openai.NotFoundError):
        await files.retrieve(made[2].id)
    assert made[2].id not in {file.id async for file in files.list()}
    kept = await files.create(file=("x.jsonl", b"x"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 7200})
    assert kept.expires_at == kept.created_at + 7200


async def test_refusals_say_what_is_wrong(system: System) -> None:
    client = system.client
    with pytest.raises(openai.BadRequestError, match="purpose"):
        await client.files.create(file=("a", b"x"), purpose="vision")
    with pytest.raises(openai.APIStatusError, match="200000 bytes") as refused:
        await client.files.create(file=("a", b"x" * 200_001), purpose="batch")
    assert refused.value.status_code == 413
    with pytest.raises(openai.APIStatusError, match="200000 bytes"):
        await client.files.create(file=("a", b"x" * 3_000_000), purpose="batch")
    with pytest.raises(openai.BadRequestError, match="file-nope"):
        await client.batches.create(input_file_id="file-nope", endpoint="/v1/chat/completions", completion_window="24h")
    file = await client.files.create(file=("a", jsonl([a_line("1")])), purpose="batch")
    with pytest.raises(openai.BadRequestError) as wrong:
        await client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
    assert wrong.value.param == "endpoint"
    with pytest.raises(openai.BadRequestError, match="completion window"):
        await client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="soon")  # type: ignore[arg-type]
    with pytest.raises(openai.NotFoundError):
        await client.batches.retrieve("batch_nope")
    with pytest.raises(openai.NotFoundError):
        await client.batches.cancel("batch_nope")


# ------------------------------------------------------------------------------------------------------------------ batches


async def test_a_batch_gives_what_single_requests_give(system: System) -> None:
    texts = {f"line-{number}": f"tell me about {number}" for number in range(20)}
    batch = await system.start([a_line(custom_id, text) for custom_id, text in texts.items()], metadata={"for": "test"})
    assert (batch.status, batch.object, batch.metadata) == ("validating", "batch", {"for": "test"})
    done = await system.end_of(batch)
    assert done.status == "completed"
    assert done.error_file_id is None
    assert done.request_counts is not None
    assert done.request_counts.model_dump() == {"total": 20, "completed": 20, "failed": 0}
    assert done.usage is not None
    assert done.usage.output_tokens == 80
    assert done.created_at <= (done.in_progress_at or 0) <= (done.finalizing_at or 0) <= (done.completed_at or 0)
    lines = await system.lines_of(done.output_file_id)
    assert [line["custom_id"] for line in lines] == list(texts)
    for line in lines[:5]:
        alone = await system.client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": texts[line["custom_id"]]}], max_tokens=4, temperature=0
        )
        assert line["response"]["status_code"] == 200
        assert line["response"]["body"]["choices"][0]["message"]["content"] == alone.choices[0].message.content
    async with Bus.connect(BrokerSettings(url=system.server.url), "looker") as bus:
        while await subject_counts(bus, BATCH_LINES.name):
            await asyncio.sleep(0.02)
    with pytest.raises(openai.ConflictError):
        await system.client.batches.cancel(batch.id)
    found = [listed.id async for listed in system.client.batches.list(limit=1)]
    assert batch.id in found
    assert len(found) == len(set(found))


async def test_all_endpoints_and_failing_lines(system: System) -> None:
    good = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"model": MODEL, "prompt": ["x", "y"], "max_tokens": 3, "n": 2},
    }
    long = {**good, "custom_id": "b", "body": {"model": MODEL, "prompt": [5] * 40_000}}
    refused = {**good, "custom_id": "c", "body": {"model": MODEL, "prompt": "x", "bad_words": ["y"]}}
    done = await system.end_of(await system.start([long, good, refused], endpoint="/v1/completions"))
    assert done.status == "completed"
    assert done.request_counts is not None
    assert done.request_counts.model_dump() == {"total": 3, "completed": 1, "failed": 2}
    [line] = await system.lines_of(done.output_file_id)
    assert line["custom_id"] == "a"
    assert [choice["index"] for choice in line["response"]["body"]["choices"]] == [0, 1, 2, 3]
    errors = await system.lines_of(done.error_file_id)
    assert [(line["custom_id"], line["response"]["status_code"]) for line in errors] == [("b", 400), ("c", 400)]
    assert errors[1]["response"]["body"]["error"]["code"] == "engine_refused"
    response = {"custom_id": "r", "method": "POST", "url": "/v1/responses", "body": {"model": MODEL, "input": "hi", "max_output_tokens": 4}}
    done = await system.end_of(await system.start([response], endpoint="/v1/responses"))
    [line] = await system.lines_of(done.output_file_id)
    assert line["response"]["body"]["object"] == "response"
    assert done.usage is not None
    assert done.usage.output_tokens == 4


async def test_lines_are_in_the_batch_class(system: System) -> None:
    seen: list[InferenceRequest] = []
    async with Bus.connect(BrokerSettings(url=system.server.url), "listener") as bus:
        await bus.subscribe("jw.requests.>", lambda message: seen.append(decode(message.data, InferenceRequest)))
        await bus.flush()
        batch = await system.start([a_line("1"), a_line("2")])
        await system.end_of(batch)
    assert {(request.priority_class, request.gateway) for request in seen} == {("batch", subjects.BATCHES)}
    assert sorted(request.request_id for request in seen) == [f"{batch.id}-1", f"{batch.id}-2"]


async def test_a_batch_with_bad_lines_fails_and_names_them(system: System) -> None:
    lines = [
        a_line("a"),
        a_line("a"),
        b"{broken",
        a_line("b", max_tokens="many"),
        a_line("c", kv_transfer_params={}),
        a_line("d", model="other"),
        a_line("e", stream=True),
    ]
    done = await system.end_of(await system.start(lines))
    assert done.status == "failed"
    assert done.failed_at is not None
    assert done.errors is not None
    told = [(error.line, error.code) for error in done.errors.data or []]
    assert told == [
        (2, "duplicate_custom_id"),
        (3, "invalid_json_line"),
        (4, "invalid_request"),
        (5, "invalid_request"),
        (6, "model_not_found"),
        (7, "invalid_request"),
    ]
    empty = await system.end_of(await system.start([]))
    assert (empty.status, [error.code for error in (empty.errors and empty.errors.data) or []]) == ("failed", ["empty_file"])


async def test_cancel_keeps_finished_lines(system: System) -> None:
    await system.fleet.stop("router-1")
    try:
        batch = await system.start([a_line(str(number)) for number in range(50)])
        while (await system.client.batches.retrieve(batch.id)).status != "in_progress":
            await asyncio.sleep(0.05)
        with pytest.raises(openai.ConflictError, match=batch.id):
            await system.client.files.delete(batch.input_file_id)
        assert (await system.client.batches.cancel(batch.id)).status in ("cancelling", "cancelled")
        done = await system.end_of(batch)
    finally:
        system.fleet.start_router()
    assert done.status == "cancelled"
    assert done.cancelled_at is not None
    errors = await system.lines_of(done.error_file_id)
    assert len(errors) + len(await system.lines_of(done.output_file_id)) == 50
    assert {line["error"]["code"] for line in errors} == {"batch_cancelled"}


async def test_the_end_of_the_window_keeps_finished_lines(system: System) -> None:
    await system.client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}], max_tokens=1)
    slow = [a_line(f"slow-{number}", f"{number} " * 300, max_tokens=2000, ignore_eos=True) for number in range(3)]
    await system.fleet.stop("router-1")
    try:
        batch = await system.start(slow, window="2s")
        done = await system.end_of(batch)
    finally:
        system.fleet.start_router()
    assert done.status == "expired"
    assert done.expired_at is not None
    errors = await system.lines_of(done.error_file_id)
    assert [line["custom_id"] for line in errors] == [line["custom_id"] for line in slow]
    assert {line["error"]["code"] for line in errors} == {"batch_expired"}


# ----------------------------------------------------------------------------------------------------------------- what dies


@dataclass
class GatewayProcess:
    process: asyncio.subprocess.Process
    url: str

    async def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        await self.process.wait()


async def start_gateway(server: NatsServer, folder: Path, name: str) -> GatewayProcess:
    ready = folder / f"{name}.json"
    arguments = ["gateway", "--name", name, "--port", "0", "--model", MODEL, "--ready-file", str(ready), "--nats-url", server.url]
    with (folder / f"{name}.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(sys.executable, "-m", "jetwake.deploy.cli", *arguments, stdout=log, stderr=log)
    while not ready.exists() or not ready.read_text():
        assert process.returncode is None, (folder / f"{name}.log").read_text()
        await asyncio.sleep(0.05)
    return GatewayProcess(process, json.loads(ready.read_text())["url"])


@pytest.mark.timeout(500)
async def test_a_killed_gateway_leaves_a_batch_that_the_next_one_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed at half of 1,000 lines; temperature above 0 and no seed, so that a line that ran twice would show."""
    cards_live_long(monkeypatch)  # two gateways start meanwhile, each for as long as a card lives and more
    tokenizer = await asyncio.to_thread(fetch, "tiny")
    prefixes = [f"document {number}: " + f"word{number} " * 100 for number in range(20)]
    lines = [a_line(f"id-{number}", prefixes[number % 20] + str(number), temperature=1) for number in range(1000)]
    options: dict[str, Any] = {"tokenizer": str(tokenizer), "vocabulary_size": 2048}
    answers: Counter[str] = Counter()
    async with (
        NatsServer(tmp_path / "nats", sync_always=False) as server,
        fleet_of(server.url, prefill=1, decode=1, **options) as (fleet, _),
        Bus.connect(BrokerSettings(url=server.url), "listener") as bus,
    ):
        await bus.subscribe("jw.batchlines.>", lambda message: answers.update([message.subject]))
        first = await start_gateway(server, tmp_path, "gateway-1")
        async with AsyncOpenAI(base_url=first.url, api_key="none") as client:
            batch = await System(server, fleet, client).start(lines)
            while len(answers) < 500:
                await asyncio.sleep(0.01)
        await first.kill()
        second = await start_gateway(server, tmp_path, "gateway-2")
        try:
            async with AsyncOpenAI(base_url=second.url, api_key="none") as client:
                system = System(server, fleet, client)
                done = await system.end_of(batch)
                output = await system.lines_of(done.output_file_id)
        finally:
            await second.kill()
    assert done.status == "completed"
    assert done.request_counts is not None
    assert done.request_counts.model_dump() == {"total": 1000, "completed": 1000, "failed": 0}
    assert [line["custom_id"] for line in output] == [line["custom_id"] for line in lines]
    assert all(len(line["response"]["body"]["choices"]) == 1 for line in output)
    assert done.usage is not None
    assert done.usage.output_tokens == 4000


async def run_batch(server: NatsServer, source: Path, output: Path, *options: str) -> asyncio.subprocess.Process:
    arguments = ["batch", "run", str(source), str(output), "--model", MODEL, "--json", "--nats-url", server.url, *options]
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "jetwake.deploy.cli", *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )


async def test_batch_run_without_a_gateway_is_killed_and_goes_on(system: System, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [a_line(f"id-{number}", f"document {number % 7} " * 50 + str(number), temperature=1) for number in range(400)]
    source.write_bytes(jsonl([*lines, a_line("bad", "y " * 40_000)]))
    sent: Counter[str] = Counter()
    async with Bus.connect(BrokerSettings(url=system.server.url), "listener") as bus:
        await bus.subscribe("jw.requests.>", lambda message: sent.update([decode(message.data, InferenceRequest).request_id]))
        await bus.flush()
        first = await run_batch(system.server, source, output, "--concurrency", "16")
        while not output.exists() or output.read_bytes().count(b"\n") < 200:
            assert first.returncode is None, await first.communicate()
            await asyncio.sleep(0.01)
        first.kill()
        await first.wait()
        kept = output.read_bytes().splitlines()[:200]
        second = await run_batch(system.server, source, output)
        told, words = await second.communicate()
    assert second.returncode == 1, words
    summary = json.loads(told)
    assert (summary["total"], summary["completed"], summary["failed"]) == (401, 400, 1)
    assert 200 <= summary["resumed"] < 401
    written = [json.loads(line) for line in output.read_bytes().splitlines()]
    assert [line["custom_id"] for line in written] == [line["custom_id"] for line in lines]
    assert {json.dumps(json.loads(line)) for line in kept} <= {json.dumps(line) for line in written}
    [failed] = [json.loads(line) for line in (tmp_path / "out.jsonl.errors").read_bytes().splitlines()]
    assert failed["response"]["status_code"] == 400
    assert sum(sent.values()) <= 400 + 16  # no more was sent twice than was on its way


async def test_batch_run_names_bad_lines(system: System, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(jsonl([a_line("a"), a_line("a"), b"{"]))
    process = await run_batch(system.server, source, output)
    told, words = await process.communicate()
    assert process.returncode == 2
    assert [error["line"] for error in json.loads(told)["errors"]] == [2, 3]
    assert f"{source}:2: custom_id: " in words.decode()
    assert not output.exists()
