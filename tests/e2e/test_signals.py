"""What a real system of real processes tells of itself: one trace for each request, through every process, and metrics that add up."""

import asyncio
import json
import os
import sys
import urllib.request
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from collector import Collector, Seen, collecting
from prometheus_client.parser import text_string_to_metric_families

from jetwake.deploy.demo_model import fetch
from jetwake.deploy.local import wait_until_served
from jetwake.deploy.nats_server import NatsServer
from jetwake.pipeline.connection import Bus, RawMessage
from jetwake.pipeline.publish import Publisher
from jetwake.pipeline.settings import BrokerSettings
from jetwake.pipeline.submit import store_request
from jetwake.producers.client import Client
from jetwake.schemas import signals
from jetwake.schemas.requests import InferenceRequest
from jetwake.schemas.timeline import TTFT_STAGES

JETWAKE = (sys.executable, "-m", "jetwake.deploy.cli")
ROLES = {"router": "router-1", "prefill": "prefill-1", "decode": "decode-1"}


class System:
    """Processes by name; `pages`: where each serves its metrics."""

    def __init__(self, url: str, collector: Collector, model: str, folder: Path) -> None:
        self.url = url
        self._model = model
        self._folder = folder
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self.environment = {
            **os.environ,
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
            "OTEL_BSP_SCHEDULE_DELAY": "50",
            "OTEL_METRIC_EXPORT_INTERVAL": "500",
        }

    async def start(self, role: str, name: str, *options: str) -> None:
        has_engine = role in ("prefill", "decode")
        engine = ("--engine", "simulated", "--model", self._model, "--engine-option", "timing=dynamo-default") if has_engine else ()
        self._processes[name] = await asyncio.create_subprocess_exec(
            *JETWAKE, role, "--name", name, *engine, *options, "--nats-url", self.url,
            env=self.environment, stderr=self._log(name).open("wb"),
        )  # fmt: skip

    def kill(self, name: str) -> None:
        self._processes.pop(name).kill()

    async def stop(self) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            await asyncio.wait_for(process.wait(), 90)

    def kill_all(self) -> None:
        for process in self._processes.values():
            if process.returncode is None:
                process.kill()

    def is_alive(self, name: str) -> bool:
        return self._processes[name].returncode is None

    def log(self, name: str) -> str:
        return self._log(name).read_text()

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    async def metrics(self, name: str) -> dict[tuple[str, tuple[str, ...]], float]:
        """Each sample by its name and label values, in the order of the labels' names."""
        said = next(line for line in self._log(name).read_text().splitlines() if line.startswith("metrics on "))
        page = await asyncio.to_thread(lambda: urllib.request.urlopen(said.removeprefix("metrics on ")).read().decode())
        return {
            (sample.name, tuple(value for _, value in sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
        }


@asynccontextmanager
async def running(
    server: NatsServer, collector: Collector, model: str, folder: Path, *more: tuple[str, str], workers: tuple[str, ...] = ()
) -> AsyncGenerator[System]:
    """Ends everything in order, so that all is sent."""
    system = System(server.url, collector, model, folder)
    try:
        for role, name in (*ROLES.items(), *more):
            await system.start(role, name, "--metrics-port", "0", *(workers if role != "router" else ()))
        async with asyncio.timeout(120):
            await wait_until_served(BrokerSettings(url=server.url), model)
        yield system
        await system.stop()
    finally:
        system.kill_all()


async def ask(system: System, *options: str) -> dict[str, Any]:
    """By the command line, which makes the root."""
    process = await asyncio.create_subprocess_exec(
        *JETWAKE, "ask", "one two three four", "--raw", "--json", "--temperature", "0", "--nats-url", system.url, *options,
        env=system.environment, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    said, _ = await process.communicate()
    assert process.returncode == 0
    answer: dict[str, Any] = json.loads(said)
    return answer


def named(spans: list[Seen], name: str) -> list[Seen]:
    return [span for span in spans if span.name == name]


async def test_one_trace_goes_through_every_process(own_server: NatsServer, tmp_path: Path) -> None:
    with collecting() as collector:
        async with running(own_server, collector, "sim", tmp_path) as system:
            answer = await ask(system, "--max-tokens", "5")
        spans = collector.of_request(answer["request_id"])
        [root] = named(spans, "request")
        assert root.parent_id == ""
        assert root.service == "jetwake-client"
        children = {span.name: span for span in spans if span is not root}
        assert {name: (span.service, span.instance) for name, span in children.items()} == {
            "route": ("jetwake-router", "router-1"),
            "prefill": ("jetwake-prefill", "prefill-1"),
            "transfer": ("jetwake-decode", "decode-1"),
            "decode": ("jetwake-decode", "decode-1"),
        }
        assert len(spans) == 5
        for span in children.values():
            assert (span.trace_id, span.parent_id) == (root.trace_id, root.span_id)
            assert span.attributes["jetwake.attempt"] == 1
            assert root.start_ns <= span.start_ns <= span.end_ns <= root.end_ns, span.name
            assert not span.error
        [(event, decision)] = children["route"].events
        assert event == signals.DECISION_EVENT
        assert decision["jetwake.routing.lane"].startswith("prefill-1-")
        assert len(decision["jetwake.routing.candidates"]) == len(decision["jetwake.routing.scores"]) == 1
        assert children["transfer"].attributes["jetwake.transfer.size"] == answer["kv_bytes"]
        assert children["decode"].attributes["gen_ai.usage.output_tokens"] == root.attributes["gen_ai.usage.output_tokens"] == 5
        known = {attribute.name for attribute in signals.ATTRIBUTES}
        assert {key for span in collector.spans for key in span.attributes} <= known
        pushed = set[str]().union(*collector.metrics.values())
        assert {"jetwake.request.stage.duration", "jetwake.worker.free_slots", "jetwake.queue.waiting"} <= pushed
        assert pushed <= {metric.name for metric in signals.METRICS} | {name for name in pushed if name.startswith("otel.")}


@pytest.mark.vllm
@pytest.mark.timeout(240)
async def test_a_gateway_joins_the_trace_of_who_asks_over_http(own_server: NatsServer, tmp_path: Path) -> None:
    """The root is the gateway's, below the caller's span; all other processes are below the root."""
    pytest.importorskip("vllm")
    tokenizer, ready = await asyncio.to_thread(fetch, "tiny"), tmp_path / "gateway.ready"
    caller_trace, caller_span = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    with collecting() as collector:
        workers = ("--engine-option", f"tokenizer={tokenizer}", "--engine-option", "vocabulary_size=2048")
        async with running(own_server, collector, "sim", tmp_path, workers=workers) as system:
            await system.start("gateway", "gateway-1", "--model", "sim", "--port", "0", "--no-over-nats", "--ready-file", str(ready))
            while not ready.exists():
                assert system.is_alive("gateway-1"), system.log("gateway-1")
                await asyncio.sleep(0.1)
            async with httpx.AsyncClient(base_url=json.loads(ready.read_text())["url"], timeout=60) as http:
                body = {"model": "sim", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "ignore_eos": True}
                response = await http.post("/chat/completions", json=body, headers={"traceparent": f"00-{caller_trace}-{caller_span}-01"})
                assert response.status_code == 200, response.text
        [root] = named(collector.spans, "request")
        assert (root.service, root.instance, root.trace_id, root.parent_id) == ("jetwake-gateway", "gateway-1", caller_trace, caller_span)
        spans = [span for span in collector.of_request(root.attributes["jetwake.request.id"]) if span is not root]
        assert sorted(span.name for span in spans) == ["decode", "prefill", "route", "transfer"]
        assert {(span.trace_id, span.parent_id) for span in spans} == {(caller_trace, root.span_id)}
        assert all(root.start_ns <= span.start_ns <= span.end_ns for span in spans)


async def test_an_attempt_that_was_lost_is_in_the_same_trace(own_server: NatsServer, tmp_path: Path) -> None:
    """The decode worker with the request is killed in mid-answer. The root is made by hand, as another tracer would."""
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with collecting() as collector:
        async with (
            running(own_server, collector, "sim", tmp_path, ("decode", "decode-2")) as system,
            Client.connect(own_server.url) as client,
        ):
            request = await client.prepare([7] * 40, max_tokens=400, temperature=0.0)
            submitted = await client.submit_request(request.model_copy(update={"trace": parent}))
            given, killed = 0, list[str]()
            async for piece in submitted:
                given += len(piece.token_ids)
                if given >= 10 and not killed:
                    killed = await busy_decoders(system)
                    for name in killed:
                        system.kill(name)
            answer = await submitted.answer()
        assert answer.attempts == 2
        spans = [span for span in collector.of_request(answer.request_id) if span.service != "jetwake-client"]
        assert {(span.trace_id, span.parent_id) for span in spans} == {tuple(parent.split("-")[1:3])}
        whole = {"route", "prefill", "transfer", "decode"}
        assert {span.name for span in spans if span.attributes["jetwake.attempt"] == 2} == whole
        assert not any(span.error for span in spans if span.attributes["jetwake.attempt"] == 2)
        first = {span.name: span for span in spans if span.attributes["jetwake.attempt"] == 1}
        assert first.keys() == {"route", "prefill", "decode", "attempt"}  # the decode leg is that of the one who got the handoff next
        for name in ("decode", "attempt"):
            assert first[name].attributes["error.type"] == "handoff_refused"
            assert first[name].error.startswith("handoff_refused: ")


async def busy_decoders(system: System) -> list[str]:
    """Whoever holds a request, by its own word."""
    running = "jetwake_worker_running_requests"
    return [name for name in ("decode-1", "decode-2") if (await system.metrics(name)).get((running, ("decode", name)))]


async def test_metrics_add_up_and_have_no_label_of_a_clients_making(own_server: NatsServer, tmp_path: Path) -> None:
    with collecting() as collector:
        async with (
            running(own_server, collector, "sim", tmp_path) as system,
            Client.connect(own_server.url) as client,
            Bus.connect(BrokerSettings(url=own_server.url), "test") as bus,
        ):
            async with asyncio.timeout(15):  # the router looks at the queues every few seconds, and those of a worker come with it
                while not {"handoff", "prefill-1", "decode-1"} <= await queue_labels(system):
                    await asyncio.sleep(0.2)
            before = await pages(system)
            prompts = [[number, *range(300)] for number in range(20)]
            answers = await asyncio.gather(*(client.generate(prompt, max_tokens=8, temperature=0.0) for prompt in prompts))
            after = await pages(system)

            def told(name: str) -> float:
                return sum(value - before.get(key, 0.0) for key, value in after.items() if key[1] == name)

            def stage_s(stage: str) -> float:
                where = f"{signals.STAGE_DURATION.prometheus}_sum"
                return sum(value - before.get(key, 0.0) for key, value in after.items() if key[1] == where and stage in key[2])

            seen_s = sum(answer.ttft_ms for answer in answers) / 1e3
            parts_s = sum(stage_s(stage) for stage in TTFT_STAGES if stage != "accept")
            parts_s += sum(answer.stages_s["delivery"] for answer in answers)
            assert parts_s == pytest.approx(seen_s, rel=0.05)
            assert told("jetwake_requests_ended_total") == told("jetwake_router_decisions_total") == 20
            assert told("jetwake_prefill_prompt_tokens_total") == 20 * 301
            assert told("jetwake_answer_tokens_total") == 20 * 8
            assert told("jetwake_transfer_size_bytes_total") == sum(answer.kv_bytes for answer in answers) > 0
            assert told("jetwake_prefill_cached_tokens_total") == sum(answer.cached_tokens for answer in answers)

            await refused_by_model(bus, await client.prepare([1, 2], max_tokens=1), 1000)
            now = await pages(system)
            grown = Counter(key[:2] for key in now) - Counter(key[:2] for key in after)
            assert all(count <= 1 for (_, name), count in grown.items() if not name.endswith("_bucket")), set(now) - set(after)

            async with asyncio.timeout(15):
                while busy := {key: value for key, value in (await pages(system)).items() if key[1] in IDLE and value}:
                    await asyncio.sleep(1)
            assert not busy
        names = {name for (_, name, _) in now}
        assert {metric.prometheus for metric in signals.METRICS if metric.kind == "gauge" and "gateway" not in metric.role} <= names


IDLE = {
    metric.prometheus
    for metric in (
        signals.QUEUE_WAITING,
        signals.QUEUE_IN_HAND,
        signals.QUEUE_OLDEST_AGE,
        signals.ROUTER_IN_HAND,
        signals.WORKER_RUNNING,
        signals.WORKER_HELD_BLOCKS,
        signals.WORKER_HELD_HANDOFFS,
        signals.WORKER_USED_BLOCKS,
    )
}


async def pages(system: System) -> dict[tuple[str, str, tuple[str, ...]], float]:
    """Of all processes: by process, name and label values."""
    return {(name, *key): value for name in ROLES.values() for key, value in (await system.metrics(name)).items()}


async def queue_labels(system: System) -> set[str]:
    return {label for _, name, labels in await pages(system) if name == "jetwake_queue_waiting" for label in labels}


async def refused_by_model(bus: Bus, request: InferenceRequest, count: int) -> None:
    """So many requests, each for a model that nobody has. Returns when the last of them has failed."""
    ended = asyncio.Event()
    left = count

    def on_end(_: RawMessage) -> None:
        nonlocal left
        left -= 1
        if not left:
            ended.set()

    await bus.subscribe("jw.events.*.failed", on_end)
    publisher = Publisher(bus)
    for number in range(count):
        await store_request(publisher, request.model_copy(update={"request_id": f"r-{number}", "model": f"made-up-{number}"}))
    async with asyncio.timeout(60):
        await ended.wait()
