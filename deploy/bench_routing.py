"""`jetwake bench routing`: what a routing policy is worth. Each policy serves the same agent workload, live, on a system of its own.

Broker, router and workers are processes, requests come at the workload's own times whatever became of those before, and what is
told is what the one client saw and what the engines reported. Caches are too small for all prefixes, which is where policies differ.
"""

import asyncio
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import psutil
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from ..pipeline.settings import BrokerSettings
from ..producers.client import Answer, Client
from ..producers.policies import make_policy
from ..schemas.errors import JetwakeError, SetupError
from .bench_system import BenchSystem, running
from .capacity.agent_workload import AgentRequest, AgentSettings, agent_requests
from .capacity.prefix_reuse import PrefixReuse
from .capacity.trace_generator import trace_of
from .engines import ENGINES

REQUEST_TIMEOUT_S = 300.0
BLOCK_SIZE_TOKENS = {"simulated": 64, "vllm": 32}
READY_TIMEOUT_S = {"simulated": 120.0, "vllm": 900.0}
PREFILL_OPTIONS = {"simulated": ("num_blocks=640", "slots=2"), "vllm": ("num_gpu_blocks_override=200", "max_num_seqs=2")}
"""About five of the prefixes fit. Two slots: what waits stays in its queue, and finds the cache as it is when its turn comes."""
DECODE_OPTIONS = {"simulated": ("num_blocks=16384", "slots=128"), "vllm": ()}

SIMULATED_WORKLOAD = AgentSettings()
VLLM_WORKLOAD = AgentSettings(
    requests=32,
    rate_per_s=0.2,
    sessions=12,
    open_sessions=8,
    prefixes=8,
    prefix_tokens=(900, 1100),
    user_tokens=(20, 60),
    answer_tokens=(4, 8),
    burst_share=0.0,
    vocabulary_size=2000,
)


@dataclass(frozen=True)
class Plan:
    """`speed`: of simulated engines, 1 being the timing model as it is. None and 0: the default of the engine.

    By default four prefill workers that miss as `round_robin` does are about 80 % busy: loaded, and not yet drowning.
    """

    engine: str = "simulated"
    model: str = "routing"
    speed: float = 0.6
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

    def system(self, policy: str) -> BenchSystem:
        prefill, decode = (4, 2) if self.engine == "simulated" else (2, 1)
        return BenchSystem(
            engine=self.engine,
            model=self.model,
            policy=policy,
            prefill=self.prefill or prefill,
            decode=self.decode or decode,
            prefill_options=[*self.engine_options(), *PREFILL_OPTIONS[self.engine]],
            decode_options=[*self.engine_options(), *DECODE_OPTIONS[self.engine]],
            ready_timeout_s=READY_TIMEOUT_S[self.engine],
        )

    def engine_options(self) -> list[str]:
        """Those of both roles."""
        block_size_tokens = BLOCK_SIZE_TOKENS[self.engine]
        if self.engine == "simulated":
            return ["timing=dynamo-default", f"speed={self.speed}", f"block_size_tokens={block_size_tokens}", "block_bytes=64"]
        return [f"block_size={block_size_tokens}", "max_model_len=2560"]


@dataclass(frozen=True)
class RoutingFigures:
    """`hit_rate`: cached tokens over prompt tokens, as the engines report; `ideal_hit_rate`: of one endless cache.

    `predicted_right`: share of requests whose router expected as many cached tokens as the engine found, within one block.
    `worker_spread`: the most requests of a prefill worker over the mean. `lateness_ms_p99`: how late the client sent.
    `cpu_busy`: of all cores of this machine, 0 to 1; near 1, the figures are the machine's and not the policy's.
    """

    policy: str
    requests: int
    completed: int
    failed: int
    hit_rate: float
    ideal_hit_rate: float
    predicted_right: float
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
        system = plan.system(policy)
        report(f"{policy}: starting {system.prefill} prefill and {system.decode} decode workers")
        async with running(system, report) as started:
            report(f"{policy}: {len(workload)} requests in {workload[-1].at_s:.0f} s")
            psutil.cpu_percent()  # counts from here
            outcomes = await send_all(started.broker, plan.model, workload)
            cpu_busy = psutil.cpu_percent() / 100
        figures.append(figures_of(policy, plan, workload, outcomes, cpu_busy))
        report(f"{policy}: hit rate {figures[-1].hit_rate:.3f}, TTFT mean {figures[-1].ttft_ms_mean:.0f} ms")
    return figures


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
    block_size_tokens = BLOCK_SIZE_TOKENS[plan.engine]
    reuse = PrefixReuse(trace_of(workload, plan.model, block_size_tokens), block_size_tokens)
    return RoutingFigures(
        policy=policy,
        requests=len(outcomes),
        completed=len(answers),
        failed=len(outcomes) - len(answers),
        hit_rate=round(sum(answer.cached_tokens for answer in answers) / sum(answer.prompt_tokens for answer in answers), 4),
        ideal_hit_rate=round(reuse.ideal, 4),
        predicted_right=round(predicted_right(answers, BLOCK_SIZE_TOKENS[plan.engine]), 4),
        ttft_ms_mean=round(statistics.fmean(first_ms), 1),
        ttft_ms_p50=percentile(first_ms, 50),
        ttft_ms_p99=percentile(first_ms, 99),
        e2e_ms_mean=round(statistics.fmean(whole_ms), 1),
        e2e_ms_p99=percentile(whole_ms, 99),
        requests_by_worker=dict(sorted(by_worker.items())),
        worker_spread=round(max(by_worker.values()) * plan.system(policy).prefill / len(answers), 2),
        mean_prompt_tokens=round(reuse.input_tokens / len(workload)),
        rate_per_s=round(len(workload) / workload[-1].at_s, 2),
        lateness_ms_p99=percentile([outcome.lateness_ms for outcome in outcomes], 99),
        cpu_busy=round(cpu_busy, 2),
        errors=dict(errors),
    )


def predicted_right(answers: Sequence[Answer], block_size_tokens: int) -> float:
    right = sum(abs(answer.predicted_cached_tokens - answer.cached_tokens) <= block_size_tokens for answer in answers)
    return right / len(answers)


def percentile(values: Sequence[float], percent: int) -> float:
    return round(statistics.quantiles(values, n=100, method="inclusive")[percent - 1], 1)


def print_routing(figures: Sequence[RoutingFigures], as_json: bool) -> None:
    if as_json:
        print(json.dumps([asdict(one) for one in figures]))
        return
    first, table = figures[0], Table(box=SIMPLE)
    table.add_column("")
    for one in figures:
        table.add_column(one.policy, justify="right")
    rows: dict[str, Callable[[RoutingFigures], str]] = {
        "completed": lambda one: str(one.completed),
        "failed": lambda one: ", ".join(f"{count} {name}" for name, count in one.errors.items()) or "0",
        "hit rate": lambda one: f"{one.hit_rate:.1%}",
        "predicted right": lambda one: f"{one.predicted_right:.1%}",
        "TTFT mean": lambda one: f"{one.ttft_ms_mean:,.0f} ms",
        "TTFT p50": lambda one: f"{one.ttft_ms_p50:,.0f} ms",
        "TTFT p99": lambda one: f"{one.ttft_ms_p99:,.0f} ms",
        "end to end mean": lambda one: f"{one.e2e_ms_mean:,.0f} ms",
        "end to end p99": lambda one: f"{one.e2e_ms_p99:,.0f} ms",
        "requests by worker": lambda one: " ".join(str(count) for count in one.requests_by_worker.values()),
        "CPU of this machine": lambda one: f"{one.cpu_busy:.0%}",
    }
    for name, cell in rows.items():
        table.add_row(name, *(cell(one) for one in figures))
    console = Console()
    console.print(
        f"{first.requests} requests at {first.rate_per_s:g}/s, {first.mean_prompt_tokens:,.0f} prompt tokens on average; "
        f"an endless cache would hit {first.ideal_hit_rate:.1%}"
    )
    console.print(table)
