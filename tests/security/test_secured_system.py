"""A whole system behind a cluster that knows its users: every part a process with its own credentials, over TLS, and nothing refused."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from jetwake.consumers.simulated_settings import SimulatedSettings
from jetwake.deploy.chaos.expected import simulated_answer
from jetwake.deploy.chaos.ledger import Aftermath, account
from jetwake.deploy.chaos.load import Load, LoadSettings, drafts
from jetwake.deploy.chaos.observer import Observer
from jetwake.deploy.demo_model import fetch
from jetwake.deploy.local import wait_until_served
from jetwake.deploy.nats_cluster import NatsCluster, wait_until_agreed, wait_until_whole
from jetwake.deploy.nats_declare import declare_all
from jetwake.deploy.nats_folder import tls_of
from jetwake.deploy.nats_users import ACCOUNTS_FILE
from jetwake.pipeline.connection import Bus, RawMessage
from jetwake.pipeline.publish import Publisher
from jetwake.pipeline.settings import TopologySettings
from jetwake.producers.client import Client
from jetwake.schemas import subjects
from jetwake.schemas.requests import Sampling

from .conftest import MODEL, Secured, folder_of_users
from .processes import Processes, processes_of

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Say something."}], "max_tokens": 12, "ignore_eos": True}


@dataclass
class System:
    secured: Secured
    cluster: NatsCluster
    processes: Processes
    gateway: str
    engine: SimulatedSettings


@pytest.fixture(scope="module")
async def system(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[System]:
    """Three servers, a gateway, two routers, two prefill and two decode workers."""
    tokenizer, folder = await asyncio.to_thread(fetch, "tiny"), tmp_path_factory.mktemp("secured-cluster")
    engine = {"tokenizer": str(tokenizer), "vocabulary_size": 2048, "num_blocks": 1024}
    folder_of_users(folder)
    accounts = (folder / ACCOUNTS_FILE).read_text()
    async with NatsCluster(folder / "brokers", 3, sync_always=False, tls=tls_of(folder, folder), extra_config=accounts) as cluster:
        secured = Secured(folder, cluster.url)
        await wait_until_agreed(secured.settings("admin"))
        async with Bus.connect(secured.settings("admin"), "admin") as bus:
            await declare_all(bus, TopologySettings(replicas=3), [MODEL])
        async with processes_of(folder, cluster.url, folder / "logs") as processes:
            for number in (1, 2):
                await processes.start(("router", ""), f"router-{number}", "router", "--name", f"router-{number}")
                for role in ("prefill", "decode"):
                    await processes.start_worker(role, number, MODEL, *(f"{key}={value}" for key, value in engine.items()))
            url = await processes.start_gateway("gateway-1", MODEL)
            async with asyncio.timeout(60):
                await wait_until_served(secured.settings("client", "alice"), MODEL)
            yield System(secured, cluster, processes, url, SimulatedSettings(model=MODEL, **engine))
            processes.check()


async def test_a_client_asks_and_comes_back_to_its_answer(system: System) -> None:
    async with Client.connect(system.secured.settings("client", "alice")) as client:
        answer = await client.generate([1, 2, 3], model=MODEL, max_tokens=8, ignore_eos=True)
        assert (len(answer.token_ids), answer.prefill_worker[:-1], answer.decode_worker[:-1]) == (8, "prefill-", "decode-")
        assert (await (await client.resume(answer.request_id)).answer()).token_ids == answer.token_ids
        assert (await client.explain(request_id=answer.request_id)).lane.startswith(answer.prefill_worker)


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


async def test_servers_that_die_under_load_cost_no_request(system: System) -> None:
    """One at a time, and each is whole again before the next: every request ends once, with the right tokens."""
    settings = LoadSettings(rate_per_s=6.0, vocabulary_size=2048, longest_prompt_tokens=300, longest_answer_tokens=60)
    limits, over = system.engine.limits(), asyncio.Event()
    async with (
        Bus.connect(system.secured.settings("admin"), "observer") as bus,
        Client.connect(system.secured.settings("client", "alice")) as alice,
        Client.connect(system.secured.settings("client", "bob")) as bob,
    ):
        load = Load([alice, bob], MODEL, lambda draft: simulated_answer(limits, draft.prompt, Sampling(**draft.sampling)), "load")
        observer = Observer(bus, load.records)
        await observer.start()
        sending = asyncio.create_task(load.send(drafts(settings, 7, 2), over))
        for server in system.cluster.servers:
            await until_accepted(load, 15)
            await server.kill()
            await until_accepted(load, 15)
            await server.start()
            assert await wait_until_whole(bus, 60) == []
        over.set()
        await sending
        await load.wait_for_ends(60)
        records = list(load.records.values())
        async with asyncio.timeout(60):
            while True:
                ends, counts = await observer.ends_of(records, MODEL)
                if all(record.submission != "accepted" or record.request_id in ends for record in records):
                    break
                await asyncio.sleep(0.5)
    ledger = account(records, ends, counts, Aftermath())
    assert ledger.is_clean, (ledger.line(), ledger.violations)
    assert ledger.accepted >= 90
    async with httpx.AsyncClient(base_url=system.gateway, timeout=60) as http:
        answer = await http.post("/chat/completions", json=CHAT)
        assert answer.status_code == 200, answer.text


async def until_accepted(load: Load, more: int) -> None:
    wanted = load.counts()[0] + more
    async with asyncio.timeout(60):
        while load.counts()[0] < wanted:
            await asyncio.sleep(0.05)


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
        assert {worker["worker"] for worker in status["workers"]} == {"prefill-1", "prefill-2", "decode-1", "decode-2"}
    assert json.loads(await run(operator, "dead", "list", "--json") or "[]") == []


async def test_an_operator_drains_it_and_nothing_was_refused_or_told(system: System) -> None:
    for name in ("decode-1", "prefill-1", "router-2"):
        await system.processes.run(("operator", ""), "drain", name)
        assert await system.processes.ended(name) == 0
    seeds = [path.read_text().strip() for path in system.secured.folder.glob("users/**/*.nk")]
    for log in system.processes.logs.glob("*.log"):
        text = log.read_text()
        assert "forbid" not in text, text
        assert not [seed for seed in seeds if seed in text]
