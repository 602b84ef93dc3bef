"""`jetwake bench overhead`: what the pipe adds, measured with a zero-time engine, beside the floor under it in the same run.

A real local system (broker, router, one prefill and one decode worker as processes, real NIXL transfers) serves requests one at a
time; the figure is submit to first token. The floor is `pipeline.floor`, before and after, on the same broker.
"""

import asyncio
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from ..pipeline.floor import measure_floor
from ..pipeline.settings import BrokerSettings
from ..producers.client import Client
from .local import local_system, run_local
from .nats_server import NatsServer
from .shared_cores import share_cores

WARM_UP = 50
MODEL = "overhead"


@dataclass(frozen=True)
class Overhead:
    """Milliseconds. `ratio`: p50 over the floor's p50. `whole_*`: submit to the last token of two."""

    p50_ms: float
    p99_ms: float
    floor_p50_ms: float
    floor_p99_ms: float
    ratio: float
    whole_p50_ms: float
    whole_p99_ms: float
    requests: int
    prompt_tokens: int
    sync_always: bool


async def measure_overhead(requests: int, prompt_tokens: int, sync_always: bool) -> Overhead:
    share_cores()
    with TemporaryDirectory(prefix="jetwake-bench-") as folder:
        async with NatsServer(Path(folder) / "broker", log_file=Path(folder) / "broker.log", sync_always=sync_always) as server:
            broker, stopping = BrokerSettings(url=server.url), asyncio.Event()
            ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            system = local_system("simulated", MODEL, "", [], "kv_aware", (1, 1, 0), Path(folder) / "system", broker)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(run_local(system, stopping, lambda url, _: ready.set_result(url), lambda _: None))
                await ready
                body_bytes = 4 * prompt_tokens + 1000
                floor_s = await measure_floor(server.url, requests // 2, body_bytes)
                first_s, whole_s = await _measure_requests(broker, requests, prompt_tokens)
                floor_s += await measure_floor(server.url, requests // 2, body_bytes)
                stopping.set()
    p50, floor_p50 = percentile_ms(first_s, 50), percentile_ms(floor_s, 50)
    return Overhead(
        p50_ms=p50,
        p99_ms=percentile_ms(first_s, 99),
        floor_p50_ms=floor_p50,
        floor_p99_ms=percentile_ms(floor_s, 99),
        ratio=round(p50 / floor_p50, 3),
        whole_p50_ms=percentile_ms(whole_s, 50),
        whole_p99_ms=percentile_ms(whole_s, 99),
        requests=requests,
        prompt_tokens=prompt_tokens,
        sync_always=sync_always,
    )


async def _measure_requests(broker: BrokerSettings, requests: int, prompt_tokens: int) -> tuple[list[float], list[float]]:
    """Seconds to the first token and to the end, of sequential requests with prompts that share nothing."""
    first_s, whole_s = list[float](), list[float]()
    async with Client.connect(broker) as client:
        for number in range(WARM_UP + requests):
            prompt = [number % 251, number // 251, *(i % 256 for i in range(prompt_tokens - 2))][:prompt_tokens]
            answer = await client.generate(prompt, model=MODEL, max_tokens=2, temperature=0.0, ignore_eos=True)
            if number >= WARM_UP:
                first_s.append(answer.ttft_ms / 1e3)
                whole_s.append(answer.total_ms / 1e3)
    return first_s, whole_s


def percentile_ms(times_s: Sequence[float], percent: int) -> float:
    return round(statistics.quantiles(times_s, n=100, method="inclusive")[percent - 1] * 1e3, 3)


def print_overhead(overhead: Overhead, as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(overhead)))
        return
    console = Console()
    console.print(f"{overhead.requests} requests, one at a time, {overhead.prompt_tokens} prompt tokens, zero-time engine")
    console.print(f"submit to first token   p50 {overhead.p50_ms:.2f} ms   p99 {overhead.p99_ms:.2f} ms")
    console.print(f"submit to last of two   p50 {overhead.whole_p50_ms:.2f} ms   p99 {overhead.whole_p99_ms:.2f} ms")
    console.print(f"floor (bare nats-py)    p50 {overhead.floor_p50_ms:.2f} ms   p99 {overhead.floor_p99_ms:.2f} ms")
    console.print(f"ratio at p50            {overhead.ratio:.2f}")
