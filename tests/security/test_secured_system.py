"""A whole system behind a cluster that knows its users: every part a process with its own credentials, over TLS, and nothing refused."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from openai import AsyncOpenAI

from jetwake.deploy.chaos.expected import simulated_answer
from jetwake.pipeline.connection import Bus, RawMessage
from jetwake.pipeline.permissions import Role
from jetwake.pipeline.publish import Publisher
from jetwake.producers.client import Client
from jetwake.producers.reading import Piece
from jetwake.schemas import subjects
from jetwake.schemas.codec import decode
from jetwake.schemas.errors import DeadlineExceeded, RequestCancelled
from jetwake.schemas.requests import Sampling
from jetwake.schemas.workers import WorkerLoad

from .conftest import MODEL
from .secured_cluster import System, running

pytestmark = pytest.mark.timeout(120)

OPERATOR: tuple[Role, str] = ("operator", "")
OBSERVER: tuple[Role, str] = ("observer", "")
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Say something."}], "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
async def system(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[System]:
    async with running(tmp_path_factory.mktemp("secured-cluster")) as system:
        yield system


async def test_a_client_asks_and_comes_back_to_its_answer(system: System) -> None:
    async with Client.connect(system.secured.settings("client", "alice")) as client:
        answer = await client.generate([1, 2, 3], model=MODEL, max_tokens=8, ignore_eos=True)
        assert (len(answer.token_ids), answer.prefill_worker[:-1], answer.decode_worker[:-1]) == (8, "prefill-", "decode-")
        assert (await (await client.resume(answer.request_id)).answer()).token_ids == answer.token_ids
        assert (await client.explain(request_id=answer.request_id)).lane.startswith(answer.prefill_worker)


async def test_requests_are_cancelled_and_run_past_their_deadlines(system: System) -> None:
    async with Client.connect(system.secured.settings("client", "alice")) as client:
        submitted = await client.submit([4, 5, 6], model=MODEL, max_tokens=2000, ignore_eos=True)
        reading = aiter(submitted)
        await anext(reading)
        await client.cancel(submitted.request_id)
        with pytest.raises(RequestCancelled):
            await collected(reading)
        with pytest.raises(DeadlineExceeded):
            await client.generate([5, 6, 7], model=MODEL, max_tokens=2000, ignore_eos=True, timeout_s=1.0)


async def collected(reading: AsyncIterator[Piece]) -> list[Piece]:
    return [piece async for piece in reading]


async def test_an_answer_goes_on_where_its_decode_worker_was_killed_and_is_read_on_from_any_token(system: System) -> None:
    prompt, sampling = list(range(1, 50)), {"max_tokens": 300, "ignore_eos": True, "seed": 7}
    expected = simulated_answer(system.engine.limits(), prompt, Sampling(**sampling))
    loads: dict[str, WorkerLoad] = {}

    def on_load(message: RawMessage) -> None:
        load = decode(message.data, WorkerLoad)
        loads[load.worker] = load

    async with (
        Bus.connect(system.secured.settings("observer"), "observer") as bus,
        Client.connect(system.secured.settings("client", "alice")) as alice,
    ):
        await bus.subscribe(subjects.LOADS, on_load)
        await bus.flush()
        submitted = await alice.submit(prompt, model=MODEL, **sampling)
        tokens, later = list[int](), None
        async for piece in submitted:
            tokens += piece.token_ids
            if len(tokens) > 20 and later is None:
                later = await alice.resume(submitted.request_id, after=10)
                [busy] = [name for name, load in loads.items() if name.startswith("decode") and load.running_requests]
                await system.processes.kill(busy)
                await system.start_worker("decode", int(busy[-1]))
        answer = await submitted.answer()
        assert (tokens, answer.token_ids, answer.attempts) == (expected, expected, 2)
        assert later is not None
        assert [token for piece in await collected(aiter(later)) for token in piece.token_ids] == expected[10:]


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


async def test_batches_run_over_http(system: System) -> None:
    async with AsyncOpenAI(base_url=system.gateway, api_key="none") as client, asyncio.timeout(60):
        file = await client.files.create(file=("in.jsonl", batch_of(6)), purpose="batch")
        batch = await client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        while batch.status != "completed":
            await asyncio.sleep(0.2)
            batch = await client.batches.retrieve(batch.id)
        assert batch.output_file_id is not None
        assert (await client.files.content(batch.output_file_id)).text.count('"status_code": 200') == 6


def batch_of(lines: int) -> bytes:
    whole = [{"custom_id": f"line-{number}", "method": "POST", "url": "/v1/chat/completions", "body": CHAT} for number in range(lines)]
    return "\n".join(json.dumps(line) for line in whole).encode()


async def test_the_live_page_of_the_gateway_shows_it_all(system: System) -> None:
    async with httpx.AsyncClient(base_url=system.admin, timeout=60) as http:
        now = await http.get("/dashboard/now")
        assert now.status_code == 200, now.text
        assert {"prefill-1", "prefill-2", "decode-1", "decode-2", "router-1", "router-2"} <= words_of(now.json())


def words_of(found: object) -> set[str]:
    """All strings anywhere in it."""
    if isinstance(found, dict):
        return set().union(*(words_of(value) for value in found.values()))
    if isinstance(found, list):
        return set().union(*(words_of(value) for value in found))
    return {found} if isinstance(found, str) else set()


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
    source = tmp_path / "in.jsonl"
    source.write_bytes(batch_of(12))
    run = system.processes.run
    submitted = json.loads(await run(OPERATOR, "batch", "submit", str(source), "--wait", "--json"))
    assert (submitted["status"], submitted["request_counts"]["completed"]) == ("completed", 12)
    await run(("client", "bob"), "batch", "run", str(source), str(tmp_path / "out.jsonl"))
    assert (tmp_path / "out.jsonl").read_text().count("\n") == 12
    assert "acme" in await run(OPERATOR, "keys", "add", "acme", "--json")
    [key] = json.loads(await run(OPERATOR, "keys", "list", "--json"))
    await run(OPERATOR, "keys", "remove", key["id"])
    for user in (OPERATOR, OBSERVER):
        status = json.loads(await run(user, "status", "--json"))
        assert {worker["worker"] for worker in status["workers"]} == {"prefill-1", "prefill-2", "decode-1", "decode-2"}
    assert json.loads(await run(OPERATOR, "dead", "list", "--json") or "[]") == []


async def test_an_operator_drains_it_and_nothing_was_refused_or_told(system: System) -> None:
    for name in ("decode-1", "prefill-1", "router-2"):
        await system.processes.run(OPERATOR, "drain", name)
        assert await system.processes.ended(name) == 0
    seeds = [path.read_text().strip() for path in system.secured.folder.glob("users/**/*.nk")]
    for log in system.processes.logs.glob("*.log"):
        text = log.read_text()
        assert "forbid" not in text, text
        assert not [seed for seed in seeds if seed in text]
