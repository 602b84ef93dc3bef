"""`jetwake bench routing`: what a routing policy is worth. Each policy serves the same agent workload, live, on a system of its own.

Broker, router and workers are processes, requests come at the workload's own times whatever became of those before, and what is
told is what the one client saw and what the engines reported. Caches are too small for all prefixes, which is where policies differ.
"""

import asyncio
import json
import statistics
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from ..pipeline.connection import Bus
from ..pipeline.registry import Registry, Workers
from ..pipeline.settings import BrokerSettings
from ..producers.client import Answer, Client
from ..producers.policies import make_policy
from ..schemas.errors import JetwakeError, SetupError
from .app import first_of
from .capacity.agent_workload import AgentRequest, AgentSettings, agent_requests, statistics_of
from .engines import ENGINES
from .local import LocalSystem, children_of, local_system, wait_until_served
from .nats_server import NatsServer
from .supervisor import Supervisor

READY_TIMEOUT_S = {"simulated": 60.0, "vllm": 600.0}
REQUEST_TIMEOUT_S = 300.0
BLOCK_SIZE_TOKENS = {"simulated": 64, "vllm": 32}

SIMULATED_OPTIONS = ("timing=dynamo-default", f"block_size_tokens={BLOCK_SIZE_TOKENS['simulated']}", "block_bytes=64")
SIMULATED_PREFILL_OPTIONS = ("num_blocks=640", "slots=2")
"""About five of the prefixes fit. Two slots: what waits stays in its queue, and finds the cache as it is when its turn comes."""
SIMULATED_DECODE_OPTIONS = ("num_blocks=16384", "slots=128")
VLLM_OPTIONS = (f"block_size={BLOCK_SIZE_TOKENS['vllm']}", "max_model_len=2560")
VLLM_PREFILL_OPTIONS = ("num_gpu_blocks_override=200", "max_num_seqs=2")
"""6,400 tokens: about five of the prefixes."""

SIMULATED_WORKLOAD = AgentSettings()
VLLM_WORKLOAD = AgentSettings(
    requests=40,
    rate_per_s=0.25,
    sessions=16,
    open_sessions=8,
    prefixes=8,
    prefix_tokens=(900, 1100),
    user_tokens=(20, 60),
    answer_tokens=(4, 8),
    vocabulary_size=2000,
)


@dataclass(frozen=True)
class Plan:
    """`speed`: of simulated engines, 1 being the timing model as it is. None and 0: the default of the engine."""

    engine: str = "simulated"
    model: str = "routing"
    speed: float = 0.5
    prefill: int = 0
    decode: int = 0
    rate_per_s: float | None = None
    requests: int | None = None
    seed: int = 0

    def workload(self) -> AgentSettings:
        settings = SIMULATED_WORKLOAD if self.engine == "simulated" else VLLM_WORKLOAD
        return replace(
            settings,
            requests=settings.requests if self.requests is None else self.requests,
            rate_per_s=settings.rate_per_s if self.rate_per_s is None else self.rate_per_s,
            seed=self.seed,
        )

    def counts(self) -> tuple[int, int]:
        """Prefill and decode workers."""
        prefill, decode = (4, 2) if self.engine == "simulated" else (2, 1)
        return self.prefill or prefill, self.decode or decode


@dataclass(frozen=True)
class RoutingFigures:
    """`hit_rate`: cached tokens over prompt tokens, as the engines report; `ideal_hit_rate`: of one endless cache.

    `worker_spread`: the most requests of a prefill worker over the mean. `lateness_ms_p99`: how late the client sent.
    `cpu_busy`: of all cores of this machine, 0 to 1; near 1, the figures are the machine's and not the policy's.
    """

    policy: str
    requests: int
    completed: int
    failed: int
    hit_rate: float
    ideal_hit_rate: float
    ttft_ms_mean: float
    ttft_ms_p50: float
    ttft_ms_p99: float
    e2e_ms_mean: float
    e2e_ms_p99: float
    requests_by_worker: dict[str, int]
    worker_spread: float
    mean_prompt_tokens: float
    rate_per_s: float
    lateness_ms_p99: float
    cpu_busy: float
    errors: dict[str, int]


@dataclass(frozen=True)
class Outcome:
    lateness_ms: float
    answer: Answer | None = None
    error: str = ""


async def measure_routing(policies: Sequence[str], plan: Plan, report: Callable[[str], None]) -> list[RoutingFigures]:
    """One after the other. Raises SetupError before anything starts for what cannot run."""
    for policy in policies:
        make_policy(policy)
    if plan.engine not in ENGINES:
        raise SetupError(f"no engine is called {plan.engine!r}; there are {', '.join(ENGINES)}")
    workload = list(agent_requests(plan.workload()))
    figures = list[RoutingFigures]()
    for policy in policies:
        report(f"{policy}: starting {plan.counts()[0]} prefill and {plan.counts()[1]} decode workers")
        async with running_system(plan, policy, report) as (broker, model):
            report(f"{policy}: {len(workload)} requests in {workload[-1].at_s:.0f} s")
            psutil.cpu_percent()
            outcomes = await send_all(broker, model, workload)
            figures.append(figures_of(policy, plan, workload, outcomes, psutil.cpu_percent() / 100))
        report(f"{policy}: hit rate {figures[-1].hit_rate:.3f}, TTFT mean {figures[-1].ttft_ms_mean:.0f} ms")
    return figures


@asynccontextmanager
async def running_system(plan: Plan, policy: str, report: Callable[[str], None]) -> AsyncGenerator[tuple[BrokerSettings, str]]:
    """Yields the broker and the model's name when all workers have met and the first request was served."""
    with TemporaryDirectory(prefix="jetwake-bench-") as folder:
        logs = Path(folder) / "logs"
        async with NatsServer(Path(folder) / "broker", log_file=Path(folder) / "broker.log") as server:
            broker = BrokerSettings(url=server.url)
            both, decoding = systems(plan, policy, broker, report)
            children = [*children_of(both, server.url, logs), *children_of(decoding, server.url, logs)[1:]]  # one router is enough
            supervisor = Supervisor(children, both.grace_s)
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(supervisor.run())
                    await _all_met(broker, plan)
                    await wait_until_served(broker, both.model)
                    yield broker, both.model
                    supervisor.stop()
            except BaseExceptionGroup as group:
                ours = group.subgroup(JetwakeError)
                if ours is None:
                    raise
                raise first_of(ours) from group


def systems(plan: Plan, policy: str, broker: BrokerSettings, report: Callable[[str], None]) -> tuple[LocalSystem, LocalSystem]:
    """The router with the prefill workers, and the decode workers: the roles' caches differ."""
    simulated = plan.engine == "simulated"
    shared = (*SIMULATED_OPTIONS, f"speed={plan.speed}") if simulated else VLLM_OPTIONS
    own = (SIMULATED_PREFILL_OPTIONS, SIMULATED_DECODE_OPTIONS) if simulated else (VLLM_PREFILL_OPTIONS, ())
    prefill, decode = (
        local_system(plan.engine, plan.model, "", [*shared, *options], policy, (*plan.counts(), 0), None, broker, report) for options in own
    )
    return replace(prefill, decode=0), replace(decode, prefill=0)


async def _all_met(broker: BrokerSettings, plan: Plan) -> None:
    """Raises NoWorker."""
    prefill, decode = plan.counts()

    def have_met(workers: Workers) -> bool:
        lanes = {card.lane for card in workers.values() if card.role == "prefill"}
        pulling = [card for card in workers.values() if card.role == "decode" and lanes <= set(card.peers)]
        return len(lanes) == prefill and len(pulling) == decode

    async with Bus.connect(broker, name="bench") as bus:
        registry = Registry(bus)
        while True:
            try:
                await registry.start()
                break
            except JetwakeError:
                await asyncio.sleep(0.1)
        await registry.wait_for(have_met, READY_TIMEOUT_S[plan.engine])


async def send_all(broker: BrokerSettings, model: str, workload: Sequence[AgentRequest]) -> list[Outcome]:
    async with Client.connect(broker) as client:
        await client.generate([1], model=model, max_tokens=2, temperature=0.0, ignore_eos=True)  # the client knows the model now
        started_s = time.perf_counter() + 0.5
        async with asyncio.TaskGroup() as tasks:
            sent = list[asyncio.Task[Outcome]]()
            for request in workload:
                prompt = request.prompt()  # made while there is time
                await asyncio.sleep(max(0.0, started_s + request.at_s - time.perf_counter()))
                lateness_ms = (time.perf_counter() - started_s - request.at_s) * 1e3
                sent.append(tasks.create_task(_send(client, model, prompt, request.max_tokens, lateness_ms)))
                del prompt
        return [task.result() for task in sent]


async def _send(client: Client, model: str, prompt: list[int], max_tokens: int, lateness_ms: float) -> Outcome:
    options = {"model": model, "max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, "timeout_s": REQUEST_TIMEOUT_S}
    try:
        return Outcome(lateness_ms, await client.generate(prompt, **options))
    except JetwakeError as error:
        return Outcome(lateness_ms, error=type(error).__name__)


def figures_of(policy: str, plan: Plan, workload: Sequence[AgentRequest], outcomes: Sequence[Outcome], cpu_busy: float) -> RoutingFigures:
    """Raises SetupError when hardly anything completed: there is nothing to tell then but the errors."""
    answers = [outcome.answer for outcome in outcomes if outcome.answer is not None]
    errors = Counter(outcome.error for outcome in outcomes if outcome.error)
    if len(answers) < 2:
        raise SetupError(f"{policy}: {len(answers)} of {len(outcomes)} requests completed; {dict(errors)}")
    first_ms, whole_ms = [answer.ttft_ms for answer in answers], [answer.total_ms for answer in answers]
    by_worker = Counter(answer.prefill_worker for answer in answers)
    known = statistics_of(workload, BLOCK_SIZE_TOKENS[plan.engine])
    return RoutingFigures(
        policy=policy,
        requests=len(outcomes),
        completed=len(answers),
        failed=len(outcomes) - len(answers),
        hit_rate=round(sum(answer.cached_tokens for answer in answers) / sum(answer.prompt_tokens for answer in answers), 4),
        ideal_hit_rate=round(known.ideal_reuse, 4),
        ttft_ms_mean=round(statistics.fmean(first_ms), 1),
        ttft_ms_p50=percentile(first_ms, 50),
        ttft_ms_p99=percentile(first_ms, 99),
        e2e_ms_mean=round(statistics.fmean(whole_ms), 1),
        e2e_ms_p99=percentile(whole_ms, 99),
        requests_by_worker=dict(sorted(by_worker.items())),
        worker_spread=round(max(by_worker.values()) * plan.counts()[0] / len(answers), 2),
        mean_prompt_tokens=round(known.mean_prompt_tokens),
        rate_per_s=round(known.requests / known.seconds, 2),
        lateness_ms_p99=percentile([outcome.lateness_ms for outcome in outcomes], 99),
        cpu_busy=round(cpu_busy, 2),
        errors=dict(errors),
    )


def percentile(values: Sequence[float], percent: int) -> float:
    return round(statistics.quantiles(values, n=100, method="inclusive")[percent - 1], 1)


def print_routing(figures: Sequence[RoutingFigures], as_json: bool) -> None:
    if as_json:
        print(json.dumps([asdict(one) for one in figures]))
        return
    first = figures[0]
    table = Table(box=SIMPLE)
    for heading in ("policy", "done", "failed", "hit rate", "TTFT mean", "p50", "p99", "E2E mean", "p99", "per worker", "CPU"):
        table.add_column(heading, justify="left" if heading in ("policy", "per worker") else "right")
    for one in figures:
        times = (one.ttft_ms_mean, one.ttft_ms_p50, one.ttft_ms_p99, one.e2e_ms_mean, one.e2e_ms_p99)
        table.add_row(
            one.policy,
            str(one.completed),
            str(one.failed),
            f"{one.hit_rate:.1%}",
            *(f"{ms:,.0f} ms" for ms in times),
            " ".join(str(count) for count in one.requests_by_worker.values()),
            f"{one.cpu_busy:.0%}",
        )
    console = Console()
    console.print(
        f"{first.requests} requests at {first.rate_per_s:g}/s, {first.mean_prompt_tokens:,.0f} prompt tokens on average; "
        f"an endless cache would hit {first.ideal_hit_rate:.1%}"
    )
    console.print(table)
