"""`jetwake bench batch`: what a running batch does to interactive requests of the same system, through the same gateway.

Windows with and without a batch take turns, so that whatever else changes on the machine meets both alike. In all of them interactive
requests come at the same pace, whatever became of those before. A batch's lines share prefixes, as those of agents do.
"""

import asyncio
import json
import random
import statistics
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ..schemas.errors import JetwakeError, SetupError
from .live_senders import HttpSender, http_sender

if TYPE_CHECKING:
    import httpx

REQUEST_TIMEOUT_S = 120.0
SETTLE_S = 2.0
BATCH_LIMIT_S = 60.0
"""How long a batch may take to begin, and to end when it is cancelled."""


@dataclass(frozen=True)
class BatchBenchPlan:
    """`rate_per_s` of interactive requests. Batch lines: `prefixes` beginnings of `prefix_tokens`, and a tail of their own."""

    http: str
    model: str | None = None
    windows: int = 8
    window_s: float = 20.0
    rate_per_s: float = 4.0
    prompt_tokens: int = 1000
    max_tokens: int = 16
    lines: int = 4_000
    prefixes: int = 50
    prefix_tokens: int = 1000
    tail_tokens: int = 50
    line_max_tokens: int = 64
    seed: int = 0


@dataclass
class WindowFigures:
    """`lines`: of the batch that were finished in it."""

    batch: bool
    ttft_ms: list[float] = field(default_factory=list[float])
    errors: int = 0
    lines: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class BatchBenchFigures:
    """`rise`: of the p95 of all windows with a batch over that of those without, 0.2 being a fifth more. `lines_per_s`: of the batch."""

    requests_without: int
    requests_beside: int
    errors: int
    ttft_ms_p50_without: float
    ttft_ms_p50_beside: float
    ttft_ms_p95_without: float
    ttft_ms_p95_beside: float
    rise_p50: float
    rise_p95: float
    lines_per_s: float
    windows: list[dict[str, Any]]


async def measure_batch(plan: BatchBenchPlan, say: Callable[[str], None]) -> BatchBenchFigures:
    """Raises SetupError when nothing answers there, or the batch does not begin."""
    draw, windows = random.Random(plan.seed), list[WindowFigures]()
    async with http_sender(plan.http, plan.model, REQUEST_TIMEOUT_S) as sender, _api(plan.http) as api:
        file_id = await _upload(api, jsonl_of(plan, sender.model.name, sender.model.vocabulary_size, draw))
        await _interactive(plan, sender, draw, 2.0, WindowFigures(batch=False))  # everything is warm after this
        for number in range(plan.windows):
            window = WindowFigures(batch=number % 2 == 1)
            if window.batch:
                await _beside_batch(plan, sender, api, file_id, draw, window)
            else:
                await _interactive(plan, sender, draw, plan.window_s, window)
            windows.append(window)
            beside = f"beside a batch ({window.lines / window.seconds:.1f} lines/s)" if window.batch else "alone"
            say(f"window {number + 1} of {plan.windows}, {beside}: TTFT p95 {percentile(window.ttft_ms, 95):,.0f} ms")
            await asyncio.sleep(SETTLE_S)
        await api.delete(f"files/{file_id}")
    return figures_of(windows)


async def _interactive(plan: BatchBenchPlan, sender: HttpSender, draw: random.Random, seconds: float, window: WindowFigures) -> None:
    """At times drawn as they come when many people ask, each with a prompt that nobody had before."""
    started_s = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        at_s = draw.expovariate(plan.rate_per_s)
        while at_s < seconds:
            prompt = [draw.randrange(3, sender.model.vocabulary_size) for _ in range(plan.prompt_tokens)]
            await asyncio.sleep(max(0.0, started_s + at_s - time.perf_counter()))
            tasks.create_task(_one(plan, sender, prompt, window))
            at_s += draw.expovariate(plan.rate_per_s)
    window.seconds = time.perf_counter() - started_s


async def _one(plan: BatchBenchPlan, sender: HttpSender, prompt: list[int], window: WindowFigures) -> None:
    sent_s, first = time.perf_counter(), list[float]()

    def note(_: int) -> None:
        if not first:
            first.append(time.perf_counter() - sent_s)

    try:
        await sender.send(prompt, plan.max_tokens, note)
    except JetwakeError:
        window.errors += 1
    if first:
        window.ttft_ms.append(first[0] * 1e3)


async def _beside_batch(
    plan: BatchBenchPlan, sender: HttpSender, api: "httpx.AsyncClient", file_id: str, draw: random.Random, window: WindowFigures
) -> None:
    body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch_id = _checked(await api.post("batches", json=body))["id"]
    begun = await _until(api, batch_id, lambda batch: batch["request_counts"]["completed"] > 0)
    await _interactive(plan, sender, draw, plan.window_s, window)
    done = _checked(await api.get(f"batches/{batch_id}"))
    if done["status"] != "in_progress":
        raise SetupError(f"the batch was over before its window was: give more lines than {plan.lines}")
    window.lines = done["request_counts"]["completed"] - begun["request_counts"]["completed"]
    _checked(await api.post(f"batches/{batch_id}/cancel"))
    await _until(api, batch_id, lambda batch: batch["status"] == "cancelled")


async def _until(api: "httpx.AsyncClient", batch_id: str, is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Raises SetupError when it does not come to that."""
    try:
        async with asyncio.timeout(BATCH_LIMIT_S):
            while not is_so(batch := _checked(await api.get(f"batches/{batch_id}"))):
                if batch["status"] in ("failed", "completed", "expired"):
                    raise SetupError(f"the batch {batch['status']}: {batch['errors']}")
                await asyncio.sleep(0.2)
            return batch
    except TimeoutError:
        raise SetupError(f"the batch is not where it should be within {BATCH_LIMIT_S:g} s") from None


def jsonl_of(plan: BatchBenchPlan, model: str, vocabulary_size: int, draw: random.Random) -> bytes:
    """Lines in an order that is bad for caches."""

    def tokens(count: int) -> list[int]:
        return [draw.randrange(3, vocabulary_size) for _ in range(count)]

    prefixes = [tokens(plan.prefix_tokens) for _ in range(plan.prefixes)]
    lines: list[bytes] = []
    for number in range(plan.lines):
        prompt = prefixes[number % plan.prefixes] + tokens(plan.tail_tokens)
        body = {"model": model, "prompt": prompt, "max_tokens": plan.line_max_tokens, "temperature": 0, "ignore_eos": True}
        lines.append(json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}).encode())
    return b"\n".join(lines)


@asynccontextmanager
async def _api(url: str) -> AsyncGenerator["httpx.AsyncClient"]:
    import httpx

    async with httpx.AsyncClient(base_url=url.rstrip("/").removesuffix("/v1") + "/v1/", timeout=REQUEST_TIMEOUT_S) as http:
        yield http


async def _upload(api: "httpx.AsyncClient", data: bytes) -> str:
    files = {"file": ("bench.jsonl", data), "purpose": (None, b"batch")}
    return str(_checked(await api.post("files", files=files))["id"])


def _checked(response: "httpx.Response") -> dict[str, Any]:
    if response.status_code != 200:
        raise SetupError(f"{response.request.method} {response.request.url.path}: HTTP {response.status_code}: {response.text[:300]}")
    fields: dict[str, Any] = response.json()
    return fields


def figures_of(windows: list[WindowFigures]) -> BatchBenchFigures:
    without = [time_ms for window in windows if not window.batch for time_ms in window.ttft_ms]
    beside = [time_ms for window in windows if window.batch for time_ms in window.ttft_ms]
    seconds = sum(window.seconds for window in windows if window.batch)
    rows = [
        asdict(window) | {"ttft_ms": None, "ttft_ms_p95": percentile(window.ttft_ms, 95), "requests": len(window.ttft_ms)}
        for window in windows
    ]
    return BatchBenchFigures(
        requests_without=len(without),
        requests_beside=len(beside),
        errors=sum(window.errors for window in windows),
        ttft_ms_p50_without=percentile(without, 50),
        ttft_ms_p50_beside=percentile(beside, 50),
        ttft_ms_p95_without=percentile(without, 95),
        ttft_ms_p95_beside=percentile(beside, 95),
        rise_p50=round(percentile(beside, 50) / percentile(without, 50) - 1, 3),
        rise_p95=round(percentile(beside, 95) / percentile(without, 95) - 1, 3),
        lines_per_s=round(sum(window.lines for window in windows) / seconds, 2) if seconds else 0.0,
        windows=[{name: value for name, value in row.items() if value is not None} for row in rows],
    )


def percentile(values: list[float], percent: int) -> float:
    """Raises SetupError for fewer than two values."""
    if len(values) < 2:
        raise SetupError("hardly any request was answered: is the system running, and the rate high enough?")
    return round(statistics.quantiles(values, n=100, method="inclusive")[percent - 1], 1)


def print_batch(figures: BatchBenchFigures, as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(figures)))
        return
    print(f"interactive TTFT, {figures.requests_without} requests alone and {figures.requests_beside} beside a batch:")
    for name, without, beside, rise in (
        ("p50", figures.ttft_ms_p50_without, figures.ttft_ms_p50_beside, figures.rise_p50),
        ("p95", figures.ttft_ms_p95_without, figures.ttft_ms_p95_beside, figures.rise_p95),
    ):
        print(f"  {name}  {without:8,.1f} ms  {beside:8,.1f} ms  {rise:+.1%}")
    print(f"batch: {figures.lines_per_s:g} lines/s; interactive errors: {figures.errors}")
