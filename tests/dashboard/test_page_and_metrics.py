"""The page on a gateway's admin port, beside the metrics endpoint there: both say the same of the same requests."""

import asyncio
from itertools import pairwise

from browser import browser, watched
from fleet import fleet_of
from gateway_system import RunningGateway, gateway_of
from prometheus_client.parser import text_string_to_metric_families

from jetwake.consumers.timing import DYNAMO_DEFAULT as SLOW
from jetwake.deploy.dashboard.histogram import quantile_s
from jetwake.deploy.dashboard.words import of_time
from jetwake.deploy.demo_model import fetch
from jetwake.deploy.nats_server import NatsServer
from jetwake.schemas.signals import TIME_PER_OUTPUT_TOKEN, TIME_TO_FIRST_TOKEN, Metric

REQUESTS = 24
APART = 2
"""Requests by which both may differ: the one that asked whether the system serves was no gateway's, and one may lie at a bucket's bound."""


async def counts(gateway: RunningGateway, metric: Metric, model: str) -> list[int]:
    """Of each bucket, as the endpoint tells."""
    page = (await gateway.admin.get("/metrics")).text
    reached = [
        (float(sample.labels["le"]), int(sample.value))
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == f"{metric.prometheus}_bucket" and sample.labels["gen_ai_request_model"] == model
    ]
    return [after - before for before, after in pairwise([0, *(count for _, count in sorted(reached))])]


async def test_percentiles_are_those_of_the_metrics_endpoint(own_server: NatsServer, unique: str) -> None:
    tokenizer = await asyncio.to_thread(fetch, "tiny")
    engine = {"tokenizer": str(tokenizer), "vocabulary_size": 2048, "slots": 2, "timing": SLOW, "max_model_len_tokens": 4096}
    async with (
        fleet_of(own_server.url, prefill=1, decode=1, model=unique, **engine),
        gateway_of(own_server.url, name=f"gateway-{unique}") as gateway,
    ):
        answers = await asyncio.gather(*(gateway.chat(unique, f"question {number}. " * 30, max_tokens=12) for number in range(REQUESTS)))
        assert {answer.status_code for answer in answers} == {200}
        origin = str(gateway.admin.base_url).rstrip("/")
        async with browser() as started, watched(started, origin) as seen:
            await seen.page.goto(f"{origin}/dashboard")
            await seen.page.wait_for_selector(f"#rows tr:nth-child({REQUESTS + 1})", timeout=20_000)
            now = (await gateway.admin.get("/dashboard/now")).json()
            for name, metric in (("ttft", TIME_TO_FIRST_TOKEN), ("itl", TIME_PER_OUTPUT_TOKEN)):
                told, shown = await counts(gateway, metric, unique), now["totals"][name]
                assert sum(told) == REQUESTS
                for share, percentile in ((0.5, "p50_s"), (0.9, "p90_s"), (0.99, "p99_s")):
                    least = quantile_s(metric.buckets, told, max(0.0, share - APART / REQUESTS)) or 0.0
                    most = quantile_s(metric.buckets, told, min(1.0, share + APART / REQUESTS)) or 0.0
                    assert least <= shown[percentile] <= most, (name, percentile, told)
                    assert of_time(shown[percentile]) in await seen.page.locator(f"#{name}").inner_text()
            assert seen.faults == []
