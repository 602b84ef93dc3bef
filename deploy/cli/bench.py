"""Measure this installation: `bench overhead`, `bench router`, `bench routing`, `bench latency`."""

from typing import Annotated

import typer

from .common import AsJson, Broker, Policy, WhichModel, run, say, takes_broker

app = typer.Typer()


@app.command()
def overhead(
    requests: Annotated[int, typer.Option(min=10, help="Sequential requests to measure.")] = 2000,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 1000,
    fast: Annotated[bool, typer.Option("--fast", help="Broker without a file sync for each message.")] = False,
    as_json: AsJson = False,
) -> None:
    """What the bus costs: submit to first token with a zero-time engine, beside the floor made with bare nats-py."""

    async def body() -> None:
        from ..bench_overhead import measure_overhead, print_overhead

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
