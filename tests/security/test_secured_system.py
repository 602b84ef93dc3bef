"""A whole system behind a broker that knows its users: every part a process with its own credentials, over TLS, and nothing refused."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from jetwake.deploy.demo_model import fetch
from jetwake.deploy.local import wait_until_served
from jetwake.pipeline.connection import Bus, RawMessage
from jetwake.pipeline.publish import Publisher
from jetwake.producers.client import Client
from jetwake.schemas import subjects

from .conftest import MODEL, Secured
from .processes import Processes, processes_of

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Say something."}], "max_tokens": 12, "ignore_eos": True}


@dataclass
class System:
    secured: Secured
    processes: Processes
    gateway: str


@pytest.fixture(scope="module")
async def system(secured: Secured, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[System]:
    tokenizer = await asyncio.to_thread(fetch, "tiny")
    async with processes_of(secured.folder, secured.server.url, tmp_path_factory.mktemp("secured-system") / "logs") as processes:
        await processes.start(("router", ""), "router-1", "router")
        for role in ("prefill", "decode"):
            await processes.start_worker(role, 1, MODEL, f"tokenizer={tokenizer}", "vocabulary_size=2048")
        url = await processes.start_gateway("gateway-1", MODEL)
        async with asyncio.timeout(60):
            await wait_until_served(secured.settings("client", "alice"), MODEL)
        yield System(secured, processes, url)
        processes.check()


async def test_a_client_asks_and_comes_back_to_its_answer(system: System) -> None:
    async with Client.connect(system.secured.settings("client", "alice")) as client:
        answer = await client.generate([1, 2, 3], model=MODEL, max_tokens=8, ignore_eos=True)
        assert (len(answer.token_ids), answer.prefill_worker, answer.decode_worker) == (8, "prefill-1", "decode-1")
        assert (await (await client.resume(answer.request_id)).answer()).token_ids == answer.token_ids
        assert (await client.explain(request_id=answer.request_id)).lane.startswith("prefill-1-")


async def test_http_answers_streams_and_resumes(system: System) -> None:
    async with httpx.AsyncClient(base_url=system.gateway, timeout=60) as http:
        answer = await http.post("/chat/completions", json=CHAT)
        assert answer.status_code == 200, answer.text
        stream = await http.post("/chat/completions", json={**CHAT, "stream": True, "max_tokens": 40})
        assert words_in(stream.text)
        again = await http.get(f"/requests/{stream.headers['x-jetwake-request-id']}/stream")
        assert (again.status_code, words_in(again.text)) == (200, words_in(stream.text))


def words_in(stream: str) -> str:
    events = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return "".join(choice["delta"].get("content") or "" for event in events[:-1] for choice in json.loads(event)["choices"])


async def test_tenants_ask_over_nats_and_hear_only_their_own(system: System, unique: str) -> None:
    body = json.dumps(CHAT).encode()
    async with (
        Bus.connect(system.secured.settings("tenant", "acme"), "acme") as acme,
        Bus.connect(system.secured.settings("tenant", "globex"), "globex") as globex,
    ):
        results: asyncio.Queue[RawMessage] = asyncio.Queue()
        others: list[RawMessage] = []
        await acme.subscribe(subjects.results_out("acme"), results.put_nowait)
        await globex.subscribe(subjects.results_out("globex"), others.append)
        await acme.flush()
        await globex.flush()
        answer = await acme.request(subjects.openai("chat.completions"), body, timeout_s=60)
        assert answer.headers[subjects.STATUS_HEADER] == "200"
        headers = {subjects.RESULT_SUBJECT_HEADER: f"{subjects.RESULTS_OUT}acme.{unique}"}
        await Publisher(acme).store_bytes(subjects.openai_job("chat.completions"), body, headers=headers)
        async with asyncio.timeout(60):
            result = await results.get()
        assert (result.subject, result.headers[subjects.STATUS_HEADER]) == (f"{subjects.RESULTS_OUT}acme.{unique}", "200")
        await globex.flush()
        assert others == []


async def test_a_gateway_does_not_publish_where_its_asker_may_not(system: System) -> None:
    heard: list[str] = []
    async with (
        Bus.connect(system.secured.settings("admin"), "admin") as admin,
        Bus.connect(system.secured.settings("tenant", "acme"), "acme") as acme,
    ):
        wanted = (subjects.cancel("job-1"), subjects.requests(MODEL, "batch"), "$KV.jw_keys.secret", f"{subjects.RESULTS_OUT}globex.x")
        for subject in wanted:
            await admin.subscribe(subject, lambda message: heard.append(message.subject))
            await admin.flush()
            await acme.publish_with_reply(subjects.openai("chat.completions"), json.dumps({**CHAT, "stream": True}).encode(), subject)
        await acme.flush()
        answer = await acme.request(subjects.openai("models"), b"", timeout_s=60)  # the one gateway has seen the others by then
        assert answer.headers[subjects.STATUS_HEADER] == "200"
        await admin.flush()
    assert heard == []


async def test_an_operator_runs_a_batch_and_reads_the_state(system: System, tmp_path: Path) -> None:
    operator, source = ("operator", ""), tmp_path / "in.jsonl"
    whole = [{"custom_id": f"line-{number}", "method": "POST", "url": "/v1/chat/completions", "body": CHAT} for number in range(12)]
    lines = [json.dumps(line) for line in whole]
    source.write_text("\n".join(lines))
    run = system.processes.run
    submitted = json.loads(await run(operator, "batch", "submit", str(source), "--wait", "--json"))
    assert (submitted["status"], submitted["request_counts"]["completed"]) == ("completed", 12)
    await run(("client", "bob"), "batch", "run", str(source), str(tmp_path / "out.jsonl"))
    assert (tmp_path / "out.jsonl").read_text().count("\n") == 12
    assert "acme" in await run(operator, "keys", "add", "acme", "--json")
    [key] = json.loads(await run(operator, "keys", "list", "--json"))
    await run(operator, "keys", "remove", key["id"])
    for user in (operator, ("observer", "")):
        status = json.loads(await run(user, "status", "--json"))
        assert {worker["worker"] for worker in status["workers"]} == {"prefill-1", "decode-1"}
    assert json.loads(await run(operator, "dead", "list", "--json") or "[]") == []


async def test_an_operator_drains_it_and_nothing_was_refused_or_told(system: System) -> None:
    for name in ("decode-1", "prefill-1", "router-1"):
        await system.processes.run(("operator", ""), "drain", name)
        assert await system.processes.ended(name) == 0
    seeds = [path.read_text().strip() for path in system.secured.folder.glob("users/**/*.nk")]
    for log in system.processes.logs.glob("*.log"):
        text = log.read_text()
        assert "forbid" not in text, text
        assert not [seed for seed in seeds if seed in text]
