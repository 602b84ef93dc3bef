"""Measure this installation: `bench overhead`, `bench router`, `bench routing`, `bench latency`, `bench live`, `bench batch`, `bench gateway`."""

from pathlib import Path
from typing import Annotated

import typer

from .common import AsJson, Broker, Policy, WhichModel, run, say, takes, takes_broker
from .replay_options import Report, progress_bar, publish
from .trace_options import TextFiles

app = typer.Typer()


@app.command()
def overhead(
    requests: Annotated[int, typer.Option(min=10, help="Sequential requests to measure.")] = 2000,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 1000,
    fast: Annotated[bool, typer.Option("--fast", help="Broker without a file sync for each message.")] = False,
    as_json: AsJson = False,
) -> None:
    """What the bus costs: submit to first token with a zero-time engine, beside the floor made with bare nats-py.

    With the `OTEL_*` variables set, this and all processes send metrics and traces: what those cost shows against a run without.
    """

    async def body() -> None:
        from ...pipeline.telemetry import telemetry
        from ..bench_overhead import measure_overhead, print_overhead

        with telemetry("client", "bench"):
            print_overhead(await measure_overhead(requests, prompt_tokens, sync_always=not fast), as_json)

    run(body)


@app.command()
def router(
    blocks: Annotated[int, typer.Option(min=1, help="Distinct blocks in the index.")] = 1_000_000,
    workers: Annotated[int, typer.Option(min=1)] = 64,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 8192,
    block_size_tokens: Annotated[int, typer.Option("--block-size", min=1, help="Tokens in a block.")] = 16,
    decisions: Annotated[int, typer.Option(min=2, help="Prompts to decide.")] = 5000,
    policy: Policy = "kv_aware",
    as_json: AsJson = False,
) -> None:
    """What a routing decision costs, from token bytes to a chosen worker, and what the prefix index takes."""

    async def body() -> None:
        from ..bench_router import Sizes, measure_router, print_router

        sizes = Sizes(blocks, workers, prompt_tokens, block_size_tokens, decisions)
        print_router(measure_router(sizes, policy), as_json)

    run(body)


@app.command()
def routing(
    policies: Annotated[str, typer.Option(help="Policies to compare, with commas between.")] = "round_robin,least_loaded,kv_aware",
    engine: Annotated[str, typer.Option("--engine", help="simulated, or vllm (slow on CPUs: minutes for each policy).")] = "simulated",
    model: Annotated[str, typer.Option("--model", help="For vllm: demo, tiny, a folder, or a Hugging Face name.")] = "demo",
    rate: Annotated[float | None, typer.Option(min=0.01, help="Requests per second. Else 12 simulated, 0.2 with vLLM.")] = None,
    requests: Annotated[int | None, typer.Option(min=10, help="Else 500 simulated, 32 with vLLM.")] = None,
    speed: Annotated[float, typer.Option(min=0.01, help="Of simulated engines: 2 takes half the time of the timing model.")] = 0.6,
    prefill: Annotated[int, typer.Option(min=0, help="Prefill workers. 0: 4 simulated, 2 with vLLM.")] = 0,
    decode: Annotated[int, typer.Option(min=0, help="Decode workers. 0: 2 simulated, 1 with vLLM.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the workload.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="A list with one JSON object for each policy.")] = False,
) -> None:
    """What a policy is worth: each serves the same agents, whose prompts share long prefixes, live on a system of its own."""

    async def body() -> None:
        from ..bench_routing import Plan, measure_routing, print_routing

        plan = Plan(engine, model if engine == "vllm" else "routing", speed, prefill, decode, rate, requests, seed)
        print_routing(await measure_routing([name.strip() for name in policies.split(",")], plan, say), as_json)

    run(body)


@app.command()
@takes_broker
def latency(
    broker: Broker,
    model: WhichModel = None,
    prompt_tokens: Annotated[str, typer.Option(help="Lengths to measure, with commas between.")] = "150,1050",
    requests: Annotated[int, typer.Option(min=1)] = 10,
    max_tokens: Annotated[int, typer.Option(min=1)] = 32,
    as_json: AsJson = False,
) -> None:
    """Time to first token of a running system (`jetwake up`), one request at a time."""

    async def body() -> None:
        from ...schemas.errors import SetupError
        from ..bench_latency import measure_latency, print_latency

        lengths = prompt_tokens.split(",")
        if not all(length.isdigit() and int(length) for length in lengths):
            raise SetupError(f"--prompt-tokens takes numbers with commas between, not {prompt_tokens!r}")
        print_latency(await measure_latency(broker.settings(), model, [int(length) for length in lengths], requests, max_tokens), as_json)

    run(body)


@app.command()
@takes("texts", TextFiles)
@takes_broker
def live(
    broker: Broker,
    texts: TextFiles,
    trace: Annotated[Path, typer.Option(metavar="FILE", help="A trace, as `jetwake replay` takes it; may be gzipped.")],
    speedup: Annotated[float, typer.Option(help="Requests come so many times as fast as in the trace.")] = 1.0,
    limit: Annotated[int, typer.Option(min=0, help="Only the first so many requests. 0: all.")] = 0,
    scale: Annotated[float, typer.Option(min=0.0, help="Lengths times this. 0: 1, or less where the model takes less.")] = 0.0,
    http: Annotated[str, typer.Option(metavar="URL", help="Through this OpenAI endpoint (http://localhost:8000) instead of NATS.")] = "",
    model: WhichModel = None,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="Deadline of every request.")] = 600.0,
    seed: Annotated[int, typer.Option(help="Of the prompts' tokens.")] = 0,
    replay_profile: Annotated[str, typer.Option(help="Replay the same on the same fleet with this profile too, and compare.")] = "",
    policy: Policy = "kv_aware",
    report: Report = None,
    requests: Annotated[Path | None, typer.Option(metavar="OUT.jsonl", help="Write one line for each request.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object; with --replay-profile a second line.")] = False,
) -> None:
    """Send a trace to a running system at the trace's own times, and report what a replay reports.

    Prompts are made up: requests that share a prefix in the trace share one here. --policy is that of the replay alone.
    """

    async def body() -> None:
        from ..bench_live import LivePlan, measure_live
        from ..capacity.profiles import profile_named
        from ..capacity.replay import replay
        from ..capacity.trace_slice import sliced

        plan = LivePlan(model, http, scale, seed, timeout_s)
        profile = profile_named(replay_profile) if replay_profile else None
        asked = sliced(texts.read(trace), limit, speedup)
        settings = broker.settings() if broker.nats_url or not http else None
        with progress_bar(1, f"sending {len(asked.requests):,} requests") as tell:
            measured = await measure_live(asked, settings, plan, say, lambda part: tell(0, part))
        labels, results = ["live"], [measured.result]
        if profile is not None:
            labels.append(f"replay, {profile.name}")
            results.append(replay(measured.trace, measured.settings(profile, policy)))
        publish(f"{asked.name}, live", labels, results, as_json, report, requests, marked=False)

    run(body)


@app.command()
def batch(
    http: Annotated[str, typer.Option(metavar="URL", help="The OpenAI endpoint of a running system.")] = "http://127.0.0.1:8000/v1",
    model: WhichModel = None,
    windows: Annotated[int, typer.Option(min=2, help="With and without a batch, in turns.")] = 8,
    window_s: Annotated[float, typer.Option(min=1.0)] = 20.0,
    rate: Annotated[float, typer.Option(min=0.1, help="Interactive requests per second.")] = 4.0,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Of interactive requests.")] = 1000,
    lines: Annotated[int, typer.Option(min=10, help="Of the batch; more than it can do in a window.")] = 4_000,
    prefix_tokens: Annotated[int, typer.Option(min=1, help="That lines of the batch share.")] = 1000,
    line_max_tokens: Annotated[int, typer.Option(min=1, help="That each line generates.")] = 64,
    seed: int = 0,
    as_json: AsJson = False,
) -> None:
    """What a running batch does to the time to first token of interactive requests beside it."""

    async def body() -> None:
        from ..bench_batch import BatchBenchPlan, measure_batch, print_batch

        plan = BatchBenchPlan(
            http=http,
            model=model,
            windows=windows,
            window_s=window_s,
            rate_per_s=rate,
            prompt_tokens=prompt_tokens,
            lines=lines,
            prefix_tokens=prefix_tokens,
            line_max_tokens=line_max_tokens,
            seed=seed,
        )
        print_batch(await measure_batch(plan, say), as_json)

    run(body)


@app.command()
def gateway(
    model: Annotated[str, typer.Option("--model", help="Whose tokenizer is used: demo, tiny, or a folder.")] = "demo",
    seconds: Annotated[float, typer.Option(min=1.0)] = 20.0,
    warm_up_s: Annotated[float, typer.Option(min=1.0)] = 5.0,
    connections: Annotated[int, typer.Option(min=1)] = 32,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="About so many.")] = 4000,
    shared_tokens: Annotated[
        int, typer.Option(min=0, help="Of them at the beginning, the same for all; as many as there are: all alike.")
    ] = 0,
    max_tokens: Annotated[int, typer.Option(min=1)] = 32,
    prefill: Annotated[int, typer.Option(min=1)] = 2,
    decode: Annotated[int, typer.Option(min=1)] = 2,
    speed: Annotated[float, typer.Option(min=0.01, help="Of the simulated engines.")] = 100.0,
    block_size_tokens: Annotated[int, typer.Option("--block-size", min=1)] = 64,
    fast: Annotated[bool, typer.Option("--fast", help="Broker without a file sync for each message.")] = False,
    load: Annotated[str, typer.Option(help="wrk, or own for the client that is built in. Else: wrk where it is installed.")] = "",
    as_json: AsJson = False,
) -> None:
    """Requests per second of one gateway in front of simulated engines, and the CPU time that each process spends on one."""

    async def body() -> None:
        from ..bench_gateway import GatewayBenchPlan, measure_gateway, print_gateway

        plan = GatewayBenchPlan(
            model=model,
            seconds=seconds,
            warm_up_s=warm_up_s,
            connections=connections,
            prompt_tokens=prompt_tokens,
            shared_tokens=shared_tokens,
            max_tokens=max_tokens,
            prefill=prefill,
            decode=decode,
            speed=speed,
            block_size_tokens=block_size_tokens,
            sync_always=not fast,
            load_program=load,
        )
        print_gateway(await measure_gateway(plan, say), as_json)

    run(body)
