"""`jetwake bench gateway`: how many streamed chat requests one gateway answers, and what each costs every process of the system.

A real local system: broker, router, simulated prefill and decode workers (real NIXL transfers), one gateway with a real
tokenizer. All of it, and what makes the load, shares the cores of this machine.
"""

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from ..schemas.errors import SetupError
from .bench_system import BenchSystem, RunningSystem, running
from .demo_model import fetch
from .http_load import Bodies, Load, load
from .local_gateway import LocalGateway, reserved_port

PATH = "/chat/completions"
OWN_TEXTS = 64
COMMON_WORDS = 4000
READY_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class GatewayBenchPlan:
    """`shared_tokens`: about so many at the beginning of all prompts; what follows begins with a number that no two requests share."""

    model: str = "demo"
    seconds: float = 20.0
    warm_up_s: float = 5.0
    connections: int = 32
    prompt_tokens: int = 4000
    shared_tokens: int = 0
    max_tokens: int = 32
    prefill: int = 2
    decode: int = 2
    speed: float = 100.0
    block_size_tokens: int = 64
    sync_always: bool = True
    load_program: str = ""
    flags: tuple[str, ...] = ()

    def system(self, gateway: LocalGateway) -> BenchSystem:
        size = [f"block_size_tokens={self.block_size_tokens}", f"num_blocks={16_384 * 64 // self.block_size_tokens}"]
        options = ["timing=dynamo-default", f"speed={self.speed}", *size, "max_model_len_tokens=131072"]
        return BenchSystem(
            engine="simulated",
            model=self.model,
            policy="kv_aware",
            prefill=self.prefill,
            decode=self.decode,
            prefill_options=options,
            decode_options=options,
            ready_timeout_s=READY_TIMEOUT_S,
            gateway=gateway,
            sync_always=self.sync_always,
        )


@dataclass(frozen=True)
class GatewayFigures:
    """`cpu_ms_per_request`: of each process. `cpu_busy`: of all cores, 0 to 1. `tokens_per_request`: given to clients."""

    requests_per_s: float
    ms_p50: float
    ms_p99: float
    requests: int
    failures: int
    tokens_per_request: float
    prompt_tokens: int
    shared_tokens: int
    connections: int
    seconds: float
    cpu_ms_per_request: dict[str, float]
    cpu_busy: float
    load_program: str
    sync_always: bool


async def measure_gateway(plan: GatewayBenchPlan, say: Callable[[str], None]) -> GatewayFigures:
    """Raises SetupError when the system does not start or does not answer."""
    import httpx

    bodies = bodies_of(plan, random.Random(0))
    gateway = LocalGateway(reserved_port(0), plan.flags)
    say(f"starting {plan.prefill} prefill and {plan.decode} decode workers and a gateway")
    with TemporaryDirectory(prefix="jetwake-load-") as folder:
        async with running(plan.system(gateway), say) as system, httpx.AsyncClient(timeout=60) as http:
            url = gateway.url + PATH
            prompt_tokens = await _prompt_tokens(http, url, bodies)
            say(f"warming up, then {plan.connections} connections for {plan.seconds:g} s; prompts of {prompt_tokens} tokens")
            await load(url, bodies, plan.connections, plan.warm_up_s, Path(folder), plan.load_program)
            cpu_s, tokens = _cpu_s(system), await _generated(http, system)
            psutil.cpu_percent()  # counts from here
            made = await load(url, bodies, plan.connections, plan.seconds, Path(folder), plan.load_program)
            busy = psutil.cpu_percent() / 100
            used_s = {name: after - cpu_s[name] for name, after in _cpu_s(system).items()}
            generated = await _generated(http, system) - tokens
    return figures_of(plan, made, used_s | {"load": made.cpu_s}, busy, generated, prompt_tokens)


def bodies_of(plan: GatewayBenchPlan, draw: random.Random) -> Bodies:
    """Text of common words, of about a token each."""
    words = common_words(fetch(plan.model) / "tokenizer.json")

    def text(count: int) -> str:
        return " ".join(draw.choices(words, k=max(0, count)))

    shared = min(plan.shared_tokens, plan.prompt_tokens)
    own = plan.prompt_tokens - shared
    fields = {"model": plan.model, "max_tokens": plan.max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    system = {"role": "system", "content": text(shared) or "You help."}
    head, tail = json.dumps(fields | {"messages": [system, {"role": "user", "content": "|"}]}).split("|")
    return Bodies(head, [f" {text(own)}{tail}" for _ in range(OWN_TEXTS if own else 1)], numbered=own > 0)


def common_words(tokenizer: Path) -> list[str]:
    """The vocabulary's first words: those that were merged first are the most common ones."""
    vocabulary: dict[str, int] = json.loads(tokenizer.read_text())["model"]["vocab"]
    words = [word[1:] for word in sorted(vocabulary, key=lambda word: vocabulary[word]) if word[0] == "\u0120"]
    return [word for word in words if word.isascii() and word.isalpha()][:COMMON_WORDS]


async def _prompt_tokens(http: Any, url: str, bodies: Bodies) -> int:
    """Of a request that is answered whole. Raises SetupError."""
    body = json.loads(bodies.body(0)) | {"stream": False}
    answer = await http.post(url, json=body)
    if answer.status_code != 200:
        raise SetupError(f"the gateway answered with {answer.status_code}: {answer.text[:300]}")
    usage: dict[str, int] = answer.json()["usage"]
    if usage["completion_tokens"] != body["max_tokens"]:
        raise SetupError(f"{usage['completion_tokens']} tokens came instead of {body['max_tokens']}")
    return usage["prompt_tokens"]


async def _generated(http: Any, system: RunningSystem) -> float:
    """Tokens that the gateway has given to clients."""
    lines = (await http.get(f"{system.admin_url}/metrics")).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("gen_ai_client_token_usage_sum{") and 'type="output"' in line)


def _cpu_s(system: RunningSystem) -> dict[str, float]:
    times = {name: psutil.Process(pid).cpu_times() for name, pid in system.processes.items()}
    return {name: spent.user + spent.system for name, spent in times.items()}


def figures_of(
    plan: GatewayBenchPlan, made: Load, used_s: Mapping[str, float], busy: float, generated: float, prompt_tokens: int
) -> GatewayFigures:
    """Raises SetupError when nothing was answered."""
    if not made.requests:
        raise SetupError("no request was answered")
    return GatewayFigures(
        requests_per_s=round(made.requests / made.seconds, 1),
        ms_p50=round(made.ms_p50, 1),
        ms_p99=round(made.ms_p99, 1),
        requests=made.requests,
        failures=made.failures,
        tokens_per_request=round(generated / made.requests, 1),
        prompt_tokens=prompt_tokens,
        shared_tokens=plan.shared_tokens,
        connections=plan.connections,
        seconds=round(made.seconds, 1),
        cpu_ms_per_request={name: round(spent_s * 1e3 / made.requests, 2) for name, spent_s in used_s.items()},
        cpu_busy=round(busy, 2),
        load_program=made.program,
        sync_always=plan.sync_always,
    )


def print_gateway(figures: GatewayFigures, as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(figures)))
        return
    print(
        f"{figures.requests_per_s:,.1f} requests/s, p50 {figures.ms_p50:,.0f} ms, p99 {figures.ms_p99:,.0f} ms, {figures.failures} failures"
    )
    print(
        f"{figures.connections} connections of {figures.load_program}, {figures.prompt_tokens:,} prompt tokens, {figures.shared_tokens:,} shared"
    )
    print("CPU ms per request: " + ", ".join(f"{name} {spent:.2f}" for name, spent in figures.cpu_ms_per_request.items()))
