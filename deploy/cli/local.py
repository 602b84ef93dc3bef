"""A whole system on this machine: `up` and `demo`."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from .common import (
    Broker,
    EngineKind,
    EngineOptions,
    Limits,
    Model,
    Policy,
    RouterOptions,
    ServedName,
    WorkerOptions,
    run,
    say,
    stop_on_signals,
    takes_broker,
)
from .configured import Config, configuration

app = typer.Typer()


@app.command(context_settings={"allow_extra_args": True})
@takes_broker
def up(
    context: typer.Context,
    broker: Broker,
    engine: EngineKind = "vllm",
    model: Model = "demo",
    served_model_name: ServedName = "",
    prefill: Annotated[int, typer.Option(min=0, help="Prefill workers.")] = 1,
    decode: Annotated[int, typer.Option(min=0, help="Decode workers.")] = 1,
    aggregated: Annotated[int, typer.Option(min=0, help="Aggregated workers.")] = 0,
    policy: Policy = "kv_aware",
    router_option: RouterOptions = None,
    engine_option: EngineOptions = None,
    worker_option: WorkerOptions = None,
    limit: Limits = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Of the OpenAI API; 0: any free one. Else 8000, and no API with simulated engines.")
    ] = None,
    gateway: Annotated[bool, typer.Option("--gateway/--no-gateway", help="Serve the OpenAI API.")] = True,
    store: Annotated[Path | None, typer.Option(help="Folder of broker data and logs, kept. Else: a temporary one.")] = None,
) -> None:
    """Run a whole system on this machine; prints `ready` and the URL when a request would be served. Ctrl-C stops it.

    What follows `--` are flags of `vllm serve` for the OpenAI API: `jetwake up -- --tool-call-parser hermes --enable-auto-tool-choice`.
    """

    async def body() -> None:
        from ..local import local_system, run_local
        from ..local_gateway import local_gateway
        from ..startup_view import StartupView

        given = broker.settings() if broker.nats_url else None
        counts = (prefill, decode, aggregated)
        options, routing = engine_option or [], router_option or []
        api = local_gateway(engine, port, gateway, context.args)
        system = local_system(
            engine,
            model,
            served_model_name,
            options,
            policy,
            counts,
            store,
            given,
            say,
            routing,
            api,
            worker_option or [],
            limit or [],
            configuration(),
        )
        with StartupView(api_url=api.url if api is not None else "") as view:
            await run_local(system, stop_on_signals(), view.ready, view.show)

    run(body)


@app.command()
def demo(
    prompt: Annotated[str, typer.Argument()] = "What is the capital of France?",
    engine: EngineKind = "vllm",
    model: Model = "demo",
    config: Config = None,
) -> None:
    """Start one prefill and one decode worker, ask one question, stop everything."""

    async def body() -> None:
        from ..ask import ask_once, print_answer
        from ..local import local_system, run_local
        from ..startup_view import StartupView

        stopping = stop_on_signals()
        system = local_system(engine, model, "", [], "kv_aware", (1, 1, 0), None, None, say, configuration=configuration())
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        with StartupView(say_ready=False) as view:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(run_local(system, stopping, lambda url, _: ready.set_result(url), view.show))
                stopped = tasks.create_task(stopping.wait())
                await asyncio.wait({ready, stopped}, return_when=asyncio.FIRST_COMPLETED)
                stopped.cancel()
                if ready.done():
                    view.close()
                    print(f"\n> {prompt}\n")
                    print_answer(await ask_once(ready.result(), prompt, model, {"max_tokens": 64, "temperature": 0.0}, show=True))
                stopping.set()

    run(body)
