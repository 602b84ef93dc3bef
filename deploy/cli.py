"""The `jetwake` command. Reads options, calls the composition, turns errors into one line and an exit code.

Exit codes: 0 done, 1 the request failed, 2 bad usage (an option, a file, the installation), 3 no broker. Nothing heavy is
imported before the command that needs it runs.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .parent_death import die_with_parent

if TYPE_CHECKING:
    from ..pipeline.settings import BrokerSettings, TopologySettings
    from ..schemas.workers import Role

EXIT_FAILED, EXIT_USAGE, EXIT_NO_BROKER = 1, 2, 3

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="Queue-first, disaggregated LLM inference."
)
model_app = typer.Typer(no_args_is_help=True, help="Models on this machine.")
bench_app = typer.Typer(no_args_is_help=True, help="Measure this installation.")
app.add_typer(model_app, name="model")
app.add_typer(bench_app, name="bench")

NatsUrl = Annotated[
    str | None,
    typer.Option(
        "--nats-url", envvar="JETWAKE_NATS_URL", help="An existing NATS server or cluster. Else: that of the running `jetwake up`."
    ),
]
Credentials = Annotated[Path | None, typer.Option("--nats-credentials", envvar="JETWAKE_NATS_CREDENTIALS", help="Credentials file.")]
TlsCa = Annotated[Path | None, typer.Option("--nats-tls-ca", envvar="JETWAKE_NATS_TLS_CA", help="CA certificate of the server.")]
TlsCert = Annotated[Path | None, typer.Option("--nats-tls-cert", envvar="JETWAKE_NATS_TLS_CERT", help="Client certificate.")]
TlsKey = Annotated[Path | None, typer.Option("--nats-tls-key", envvar="JETWAKE_NATS_TLS_KEY", help="Key of the client certificate.")]
EngineKind = Annotated[str, typer.Option("--engine", help="vllm, or simulated (no model: for tests and scale).")]
Model = Annotated[str, typer.Option("--model", help="demo, tiny (random weights), a folder, or a Hugging Face name.")]
ServedName = Annotated[str, typer.Option("--served-model-name", help="The name requests use. Else: --model as given.")]
EngineOptions = Annotated[
    list[str] | None,
    typer.Option("--engine-option", help="KEY=VALUE, any option of the engine: `--engine-option max_num_seqs=16`. Repeatable."),
]
Policy = Annotated[str, typer.Option("--policy", help="kv_aware, least_loaded, power_of_two, random or round_robin.")]
RouterOptions = Annotated[
    list[str] | None,
    typer.Option("--router-option", help="KEY=VALUE of the router: `--router-option direct_max_new_tokens=256`. Repeatable."),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]


def main() -> None:
    parent = os.environ.pop("JETWAKE_PARENT_PID", "")
    if parent.isdigit():
        die_with_parent(int(parent))
    app()


def run(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs a command's coroutine; our errors become one line on standard error and an exit code."""
    from ..schemas.errors import BusError, JetwakeError, RequestRefused, SetupError

    async def ungrouped() -> None:
        """A command that runs things side by side fails with a group around the one error that ended it."""
        try:
            await body()
        except BaseExceptionGroup as group:
            ours = group.subgroup(JetwakeError)
            if ours is None:
                raise
            error: BaseException = ours
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            raise error from group

    try:
        asyncio.run(ungrouped())
    except JetwakeError as error:
        code = EXIT_FAILED
        if isinstance(error, BusError):
            code = EXIT_NO_BROKER
        elif isinstance(error, SetupError | RequestRefused):
            code = EXIT_USAGE
        print(f"jetwake: {error}", file=sys.stderr)
        raise typer.Exit(code) from error


def broker_settings(url: str | None, credentials: Path | None, ca: Path | None, cert: Path | None, key: Path | None) -> "BrokerSettings":
    """The broker named by options or environment, else that of the local system. Raises BrokerUnavailable when there is none."""
    from ..pipeline.settings import BrokerSettings
    from ..schemas.errors import BrokerUnavailable
    from .local import running_url

    url = url or running_url()
    if url is None:
        raise BrokerUnavailable("no broker: start `jetwake up` in another terminal, or name one with --nats-url")
    return BrokerSettings(url=url, credentials_file=credentials, tls_ca_file=ca, tls_cert_file=cert, tls_key_file=key)


def stop_on_signals() -> asyncio.Event:
    """Set by SIGTERM or Ctrl-C: drain and leave."""
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    return stopping


def topology_settings() -> "TopologySettings":
    from ..pipeline.settings import TopologySettings

    return TopologySettings()


def say(text: str) -> None:
    """Progress, on standard error."""
    print(text, file=sys.stderr, flush=True)


def start_logging() -> None:
    import logging

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)


@app.command()
def router(
    name: Annotated[str, typer.Option(help="This router's name.")] = "router-1",
    policy: Policy = "kv_aware",
    router_option: RouterOptions = None,
    nats_url: NatsUrl = None,
    credentials: Credentials = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Run one router: gives each request to a worker."""

    async def body() -> None:
        from .app import router_settings, run_router

        start_logging()
        broker = broker_settings(nats_url, credentials, tls_ca, tls_cert, tls_key)
        await run_router(router_settings(name, policy, router_option or []), broker, topology_settings(), stop_on_signals())

    run(body)


def worker_command(role: "Role") -> Callable[..., None]:
    def command(
        name: Annotated[str, typer.Option(help="This worker's name, unique in the fleet.")] = f"{role}-1",
        engine: EngineKind = "vllm",
        model: Model = "demo",
        served_model_name: ServedName = "",
        engine_option: EngineOptions = None,
        domain: Annotated[str, typer.Option(help="Where it stands (a rack, a host): told on its card.")] = "",
        nats_url: NatsUrl = None,
        credentials: Credentials = None,
        tls_ca: TlsCa = None,
        tls_cert: TlsCert = None,
        tls_key: TlsKey = None,
    ) -> None:
        async def body() -> None:
            from .app import WorkerSettings
            from .engines import make_engine
            from .options import parse_options
            from .worker import run_worker

            start_logging()
            broker = broker_settings(nats_url, credentials, tls_ca, tls_cert, tls_key)
            made = make_engine(engine, model, served_model_name, parse_options(engine_option or [], "--engine-option"))
            settings = WorkerSettings(name=name, role=role, domain=domain)
            await run_worker(settings, made, broker, topology_settings(), stop_on_signals())

        run(body)

    return command


app.command("prefill", help="Run one prefill worker: fills KV caches and hands them on.")(worker_command("prefill"))
app.command("decode", help="Run one decode worker: pulls KV caches and generates.")(worker_command("decode"))
app.command("aggregated", help="Run one worker that does both: the baseline.")(worker_command("aggregated"))


@app.command()
def up(
    engine: EngineKind = "vllm",
    model: Model = "demo",
    served_model_name: ServedName = "",
    prefill: Annotated[int, typer.Option(min=0, help="Prefill workers.")] = 1,
    decode: Annotated[int, typer.Option(min=0, help="Decode workers.")] = 1,
    aggregated: Annotated[int, typer.Option(min=0, help="Aggregated workers.")] = 0,
    policy: Policy = "kv_aware",
    router_option: RouterOptions = None,
    engine_option: EngineOptions = None,
    store: Annotated[Path | None, typer.Option(help="Folder of broker data and logs, kept. Else: a temporary one.")] = None,
    nats_url: NatsUrl = None,
    credentials: Credentials = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Run a whole system on this machine; prints `ready` when a request would be served. Ctrl-C stops it."""

    async def body() -> None:
        from .local import local_system, run_local
        from .startup_view import StartupView

        broker = broker_settings(nats_url, credentials, tls_ca, tls_cert, tls_key) if nats_url else None
        counts = (prefill, decode, aggregated)
        system = local_system(
            engine, model, served_model_name, engine_option or [], policy, counts, store, broker, say, router_option or []
        )
        with StartupView() as view:
            await run_local(system, stop_on_signals(), view.ready, view.show)

    run(body)


@app.command()
def demo(
    prompt: Annotated[str, typer.Argument()] = "What is the capital of France?",
    engine: EngineKind = "vllm",
    model: Model = "demo",
) -> None:
    """Start one prefill and one decode worker, ask one question, stop everything."""

    async def body() -> None:
        from .ask import ask_once, print_answer
        from .local import local_system, run_local
        from .startup_view import StartupView

        stopping = stop_on_signals()
        system = local_system(engine, model, "", [], "kv_aware", (1, 1, 0), None, None, say)
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        with StartupView(say_ready=False) as view:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(run_local(system, stopping, ready.set_result, view.show))
                stopped = tasks.create_task(stopping.wait())
                await asyncio.wait({ready, stopped}, return_when=asyncio.FIRST_COMPLETED)
                stopped.cancel()
                if ready.done():
                    view.close()
                    print(f"\n> {prompt}\n")
                    print_answer(await ask_once(ready.result(), prompt, model, {"max_tokens": 64, "temperature": 0.0}, show=True))
                stopping.set()

    run(body)


@app.command()
def ask(
    prompt: str,
    model: Annotated[str | None, typer.Option(help="Which model, when there is more than one.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Else 256, or what the model's context leaves.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0)] = 1.0,
    seed: Annotated[int | None, typer.Option()] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text. Repeatable.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Send the prompt as it is, without the model's chat template.")] = False,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="Deadline of the request.")] = 600.0,
    as_json: AsJson = False,
    nats_url: NatsUrl = None,
    credentials: Credentials = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Ask one question; the answer streams, then one line says how it was made."""

    async def body() -> None:
        from .ask import ask_once, print_answer, print_json

        broker = broker_settings(nats_url, credentials, tls_ca, tls_cert, tls_key)
        options: dict[str, Any] = {
            "temperature": temperature,
            "seed": seed,
            "stop": stop or [],
            "timeout_s": timeout_s,
        }
        if max_tokens is not None:
            options["max_tokens"] = max_tokens
        answer = await ask_once(broker, prompt, model, options, raw=raw, show=not as_json)
        print_json(answer) if as_json else print_answer(answer)

    run(body)


@app.command()
def status(
    as_json: AsJson = False,
    nats_url: NatsUrl = None,
    credentials: Credentials = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Workers, queues and what is in flight."""

    async def body() -> None:
        from .status import print_status, read_status

        print_status(await read_status(broker_settings(nats_url, credentials, tls_ca, tls_cert, tls_key)), as_json)

    run(body)


@app.command()
def explain(
    subject: Annotated[str, typer.Argument(metavar="PROMPT|REQUEST_ID", help="A prompt, or the id of a request that was routed.")],
    model: Annotated[str | None, typer.Option(help="Which model, when there is more than one.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Take the prompt as it is, without the model's chat template.")] = False,
    as_json: AsJson = False,
    nats_url: NatsUrl = None,
    credentials: Credentials = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Why a request went where it went, or where a prompt would go now: every candidate with its score."""

    async def body() -> None:
        from .explain import explain as ask_router
        from .explain import print_explanation

        broker = broker_settings(nats_url, credentials, tls_ca, tls_cert, tls_key)
        print_explanation(await ask_router(broker, subject, model, raw), as_json)

    run(body)


@model_app.command("fetch")
def model_fetch(name: Annotated[str, typer.Argument(help="demo, tiny, a folder, or a Hugging Face name.")] = "demo") -> None:
    """Make a model ready on this machine and print where it is."""

    async def body() -> None:
        from .demo_model import fetch

        print(fetch(name, report=say))

    run(body)


@bench_app.command("overhead")
def bench_overhead(
    requests: Annotated[int, typer.Option(min=10, help="Sequential requests to measure.")] = 2000,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 1000,
    fast: Annotated[bool, typer.Option("--fast", help="Broker without a file sync for each message.")] = False,
    as_json: AsJson = False,
) -> None:
    """What the bus costs: submit to first token with a zero-time engine, beside the floor made with bare nats-py."""

    async def body() -> None:
        from .bench_overhead import measure_overhead, print_overhead

        print_overhead(await measure_overhead(requests, prompt_tokens, sync_always=not fast), as_json)

    run(body)


@bench_app.command("router")
def bench_router(
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
        from .bench_router import Sizes, measure_router, print_router

        sizes = Sizes(blocks, workers, prompt_tokens, block_size_tokens, decisions)
        print_router(measure_router(sizes, policy), as_json)

    run(body)


@bench_app.command("routing")
def bench_routing(
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
        from .bench_routing import Plan, measure_routing, print_routing

        plan = Plan(engine, model if engine == "vllm" else "routing", speed, prefill, decode, rate, requests, seed)
        print_routing(await measure_routing([name.strip() for name in policies.split(",")], plan, say), as_json)

    run(body)


@bench_app.command("latency")
def bench_latency(
    model: Annotated[str | None, typer.Option(help="Which model, when there is more than one.")] = None,
    prompt_tokens: Annotated[str, typer.Option(help="Lengths to measure, with commas between.")] = "150,1050",
    requests: Annotated[int, typer.Option(min=1)] = 10,
    max_tokens: Annotated[int, typer.Option(min=1)] = 32,
    as_json: AsJson = False,
    nats_url: NatsUrl = None,
    credentials: Credentials = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Time to first token of a running system (`jetwake up`), one request at a time."""

    async def body() -> None:
        from ..schemas.errors import SetupError
        from .bench_latency import measure_latency, print_latency

        lengths = prompt_tokens.split(",")
        if not all(length.isdigit() and int(length) for length in lengths):
            raise SetupError(f"--prompt-tokens takes numbers with commas between, not {prompt_tokens!r}")
        broker = broker_settings(nats_url, credentials, tls_ca, tls_cert, tls_key)
        print_latency(await measure_latency(broker, model, [int(length) for length in lengths], requests, max_tokens), as_json)

    run(body)


@app.command()
def schemas(folder: Annotated[Path, typer.Argument(help="Where to write one JSON Schema for each message.")]) -> None:
    """Export the JSON Schemas of all messages."""

    async def body() -> None:
        from ..schemas.json_schema import files

        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files().items():
            (folder / name).write_text(text)

    run(body)


if __name__ == "__main__":
    main()
