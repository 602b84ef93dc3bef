"""Durable jobs: one result each, whoever dies. The application is a small one; `test_over_nats` has the whole."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fleet import fleet_of
from nats_apps import TOKENS, AskingApp, EchoApp

from jetwake.consumers.timing import FittedTiming
from jetwake.deploy.nats_server import NatsServer
from jetwake.pipeline.catalogue import ModelCatalogue
from jetwake.pipeline.clock import ServerClock, WallClock, timestamp_ns
from jetwake.pipeline.connection import Bus, RawMessage
from jetwake.pipeline.jetstream import api, last_message, stored_messages
from jetwake.pipeline.publish import Publisher
from jetwake.pipeline.replies import ReplyInbox
from jetwake.pipeline.settings import BrokerSettings
from jetwake.pipeline.topology import queue_progress
from jetwake.producers.gateway.jobs import MAX_DELIVERIES, Jobs, JobSettings
from jetwake.schemas import subjects
from jetwake.schemas.codec import decode
from jetwake.schemas.replies import DeadLetter, Finished
from jetwake.schemas.streams import DEAD, OPENAI_JOBS, OPENAI_RESULTS, RESULTS
from jetwake.schemas.workers import ModelCard

CHAT = subjects.openai_job("chat.completions")
SLOW = FittedTiming(0.0, 0.0, 0.0, decode_step_base_s=0.005, decode_sequence_s=0.0, decode_context_token_s=0.0)
OUT = f"{subjects.RESULTS_OUT}mine"


class Desk:
    """Sends jobs and hears results."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.publisher = Publisher(bus)
        self.heard: asyncio.Queue[RawMessage] = asyncio.Queue()

    async def send(self, fields: Any, subject: str = CHAT, result: str | None = OUT, **headers: str) -> int:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        if result is not None:
            given[subjects.RESULT_SUBJECT_HEADER] = result
        body = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
        return (await self.publisher.store_bytes(subject, body, headers=given)).sequence

    async def result(self) -> RawMessage:
        async with asyncio.timeout(20):
            return await self.heard.get()

    async def kept(self) -> list[RawMessage]:
        return await stored_messages(self.bus, OPENAI_RESULTS.name, "jw.openai.results.*")

    async def settled(self) -> None:
        """No job is left in the stream."""
        async with asyncio.timeout(20):
            while (await queue_progress(self.bus, OPENAI_JOBS.name))[0]:
                await asyncio.sleep(0.01)


@pytest.fixture
async def desk(own_server: NatsServer) -> AsyncIterator[Desk]:
    async with Bus.connect(BrokerSettings(url=own_server.url), "desk") as bus:
        made = Desk(bus)
        await bus.subscribe(OUT, made.heard.put_nowait)
        await bus.flush()
        yield made


@asynccontextmanager
async def gateway(url: str, *names: str, app: EchoApp | None = None, known_for_s: float = 60.0) -> AsyncIterator[EchoApp]:
    async with Bus.connect(BrokerSettings(url=url), "gateway") as bus:
        app, clock, inbox = app or EchoApp(), ServerClock(bus), ReplyInbox(bus, "gateway", WallClock())
        await clock.sync()
        settings = JobSettings("gateway", 8, 3600.0, known_for_s)
        jobs = Jobs(bus, Publisher(bus), clock, inbox, app, names or ("m",), settings)
        await jobs.start()
        running = asyncio.create_task(jobs.run())
        try:
            yield app
        finally:
            await jobs.stop(0.0)
            await running


async def test_a_job_waits_for_a_gateway_and_has_one_result(own_server: NatsServer, desk: Desk) -> None:
    sequence = await desk.send({"model": "m"}, Nats_Msg_Id="order-7", X_Request_Id="mine", Jw_Metadata='{"a": "b"}')
    async with gateway(own_server.url) as app:
        result = await desk.result()
        await desk.settled()
    assert json.loads(result.data)["path"] == "/v1/chat/completions"
    assert result.headers[subjects.STATUS_HEADER] == "200"
    assert result.headers[subjects.JOB_SEQUENCE_HEADER] == str(sequence)
    assert result.headers[subjects.JOB_MESSAGE_ID_HEADER] == "order-7"
    assert result.headers["X-Request-Id"] == "mine"
    assert result.headers[subjects.REQUEST_HEADER] == app.exchanges[0].request_id
    assert app.exchanges[0].metadata == {"a": "b"}
    [kept] = await desk.kept()
    assert kept.data == result.data
    assert app.calls == 1
    assert desk.heard.empty()


async def test_a_job_of_a_gateway_that_ended_is_done_by_another_under_the_same_id(own_server: NatsServer, desk: Desk) -> None:
    async with gateway(own_server.url) as first:
        await desk.send({"hold": True})
        await first.waiting.wait()
    async with gateway(own_server.url) as second:
        await second.waiting.wait()
        second.go.set()
        await desk.result()
        await desk.settled()
    assert first.exchanges[0].request_id == second.exchanges[0].request_id
    assert desk.heard.empty()
    assert len(await desk.kept()) == 1


@pytest.mark.parametrize(("noted", "known_for_s", "sent", "attempt"), [(True, 60.0, 1, 1), (False, 60.0, 2, 1), (False, 0.0, 2, 2)])
async def test_the_next_gateway_reads_on_where_the_first_one_was(
    own_server: NatsServer, desk: Desk, noted: bool, known_for_s: float, sent: int, attempt: int
) -> None:
    """Also when the first one ended before it had noted that its request was taken. One request, run once or fenced, gives one result."""
    requests: list[RawMessage] = []
    await desk.bus.subscribe("jw.requests.>", requests.append)
    async with fleet_of(own_server.url, aggregated=1, timing=SLOW):
        requests.clear()
        await desk.send({})
        async with gateway(own_server.url, app=(first := AskingApp())):
            await first.begun.wait()
        assert not await stored_messages(desk.bus, RESULTS.name, "jw.results.*.jobs.*"), "the answer goes on"
        if not noted:
            await api(desk.bus, f"STREAM.PURGE.{OPENAI_RESULTS.name}", {"filter": "jw.openai.accepted.*"})
        async with gateway(own_server.url, app=(second := AskingApp()), known_for_s=known_for_s):
            result = await desk.result()
            await desk.settled()
    assert len(bytes.fromhex(result.data.decode())) == 4 * TOKENS
    assert (first.calls, second.calls, len(requests)) == (1, 1, sent)
    *_fence, terminal = await stored_messages(desk.bus, RESULTS.name, subjects.results_of(result.headers[subjects.REQUEST_HEADER]))
    ended = decode(terminal.data, Finished)
    assert (ended.attempt, ended.tokens.hex()) == (attempt, result.data.decode())
    assert desk.heard.empty()


async def test_a_result_that_was_kept_and_not_told_is_told_and_not_made_again(own_server: NatsServer, desk: Desk) -> None:
    """What a gateway leaves that dies between the two."""
    sequence = await desk.send({"model": "m"})
    stored = await api(desk.bus, f"STREAM.MSG.GET.{OPENAI_JOBS.name}", {"seq": sequence})
    job = subjects.job_id(sequence, timestamp_ns(stored["message"]["time"]))
    await desk.publisher.store_bytes(subjects.openai_result(job), b"kept before", headers={subjects.STATUS_HEADER: "200"})
    async with gateway(own_server.url) as app:
        assert (await desk.result()).data == b"kept before"
        await desk.settled()
        assert app.calls == 0


async def test_a_full_system_is_tried_again_until_the_jobs_time_is_over(own_server: NatsServer, desk: Desk) -> None:
    await desk.send({"status": 503}, Jw_Timeout_S="0.5")
    async with gateway(own_server.url) as app:
        result = await desk.result()
        assert result.headers[subjects.STATUS_HEADER] == "504"
        assert app.calls > 1
        await desk.send({"status": 404})
        assert (await desk.result()).headers[subjects.STATUS_HEADER] == "404", "what cannot help is not tried again"


@pytest.mark.parametrize(
    ("fields", "subject", "result", "headers", "word"),
    [
        ({"stream": True}, CHAT, OUT, {}, "stream"),
        ({}, subjects.openai_job("models"), OUT, {}, "models"),
        ({}, CHAT, OUT, {"Jw_Timeout_S": "soon"}, "Jw-Timeout-S"),
        ({}, CHAT, "jw.requests.m.batch", {}, "jw.results-out."),
        ({}, CHAT, "JW.cancel.x", {}, "jw.results-out."),
        ({}, CHAT, "$JS.API.STREAM.DELETE.JW_REQUESTS", {}, "$"),
        ({}, CHAT, "_INBOX.abc", {}, "inboxes"),
        ({}, CHAT, "mine.*", {}, "wildcards"),
    ],
)
async def test_what_cannot_be_a_job_has_an_error_for_a_result_and_a_dead_letter(
    own_server: NatsServer, desk: Desk, fields: Any, subject: str, result: str, headers: dict[str, str], word: str
) -> None:
    everything: list[str] = []
    await desk.bus.subscribe(">", lambda message: everything.append(message.subject))
    await desk.send(fields, subject, result, **headers)
    async with gateway(own_server.url) as app:
        await desk.settled()
    [kept] = await desk.kept()
    assert kept.headers[subjects.STATUS_HEADER] == "400"
    assert word in json.loads(kept.data)["error"]["message"]
    letter = await last_message(desk.bus, DEAD.name, subjects.dead("openai-jobs"))
    assert letter is not None
    assert decode(letter.data, DeadLetter).code == "invalid_request"
    assert app.calls == 0
    assert (OUT in everything) == (result == OUT)
    assert result == OUT or result not in everything


async def test_a_job_that_ends_every_gateway_is_given_up(own_server: NatsServer, desk: Desk) -> None:
    await desk.send({"hold": True})
    for _ in range(MAX_DELIVERIES):
        async with gateway(own_server.url) as app:
            await app.waiting.wait()
    async with gateway(own_server.url) as app:
        result = await desk.result()
        await desk.settled()
        assert app.calls == 0
    assert json.loads(result.data)["error"]["code"] == "job_given_up"
    letter = await last_message(desk.bus, DEAD.name, subjects.dead("openai-jobs"))
    assert letter is not None
    assert json.loads(decode(letter.data, DeadLetter).payload) == {"hold": True}


async def test_a_job_can_be_cancelled_before_and_while_it_runs(own_server: NatsServer, desk: Desk) -> None:
    waiting = await desk.send({"model": "m"})
    await desk.bus.publish(subjects.cancel(subjects.job_name(waiting)), b"")
    await desk.bus.flush()
    async with gateway(own_server.url) as app:
        assert (await desk.result()).headers[subjects.STATUS_HEADER] == "409"
        assert app.calls == 0
        running = await desk.send({"hold": True})
        await app.waiting.wait()
        await desk.bus.publish(subjects.cancel(subjects.job_name(running)), b"")
        assert (await desk.result()).headers[subjects.STATUS_HEADER] == "409"


async def test_jobs_reach_the_gateways_of_their_model(own_server: NatsServer, desk: Desk) -> None:
    card = ModelCard(model="b/c", source="", vocabulary_size=10, max_model_len_tokens=10, block_size_tokens=16)
    await ModelCatalogue(desk.bus, desk.publisher).put(card)
    async with gateway(own_server.url, "a") as other:
        sequence = await desk.send({"model": "b/c"}, Nats_Msg_Id="order-8")
        await desk.send({"model": "nobody's"})
        await desk.result()
        assert other.calls == 1, "an unknown model is for the application to refuse"
        async with gateway(own_server.url, "b/c") as right:
            result = await desk.result()
            await desk.settled()
            assert right.calls == 1
    assert result.headers[subjects.JOB_SEQUENCE_HEADER] == str(sequence)
    assert result.headers[subjects.JOB_MESSAGE_ID_HEADER] == "order-8"


async def test_an_own_subject_gets_the_result_with_an_id_for_its_stream(own_server: NatsServer, desk: Desk) -> None:
    heard: asyncio.Queue[RawMessage] = asyncio.Queue()
    await desk.bus.subscribe("app.answers.7", heard.put_nowait)
    await desk.send({}, result="app.answers.7")
    async with gateway(own_server.url):
        result = await asyncio.wait_for(heard.get(), 20)
    assert result.headers[subjects.MESSAGE_ID_HEADER].endswith(":result")
