"""One process of a fleet: `router`, `prefill`, `decode`, `aggregated`."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from .common import (
    Broker,
    EngineKind,
    EngineOptions,
    HealthFile,
    Limits,
    Logs,
    Metrics,
    Model,
    Policy,
    RouterOptions,
    ServedName,
    WorkerOptions,
    fast_loop,
    run,
    stop_on_signals,
    takes_broker,
    takes_logs,
    takes_metrics,
    topology_settings,
)
from .configured import configured

if TYPE_CHECKING:
    from ...schemas.workers import Role

app = typer.Typer()


@app.command()
@takes_broker
@takes_metrics
@takes_logs
def router(
    broker: Broker,
    metrics: Metrics,
    logs: Logs,
    name: Annotated[str, typer.Option(help="This router's name; auto: router and the machine's name.")] = "router-1",
    policy: Policy = "kv_aware",
    router_option: RouterOptions = None,
    limit: Limits = None,
    health_file: HealthFile = None,
) -> None:
    """Run one router: gives each request to a worker."""

    async def body() -> None:
        from ..app import run_router
        from ..health import HealthTeller
        from ..role_settings import router_settings
        from ..this_machine import name_of

        logs.start()
        settings = router_settings(name_of(name, "router"), policy, router_option or [], configured("router"))
        health = HealthTeller(settings.name, health_file)
        with metrics.served("router", settings.name):
            async with health.telling():
                await run_router(settings, broker.settings(), topology_settings(limit), stop_on_signals(), health)

    run(body, loop_factory=fast_loop())


def worker_command(role: "Role") -> Callable[..., None]:
    @takes_broker
    @takes_metrics
    @takes_logs
    def command(
        broker: Broker,
        metrics: Metrics,
        logs: Logs,
        name: Annotated[
            str, typer.Option(help="This worker's name, unique in the fleet; auto: the role and the machine's name.")
        ] = f"{role}-1",
        engine: EngineKind = "vllm",
        model: Model = "demo",
        served_model_name: ServedName = "",
        engine_option: EngineOptions = None,
        domain: Annotated[str, typer.Option(help="Where it stands (a rack, a host): told on its card.")] = "",
        worker_option: WorkerOptions = None,
        limit: Limits = None,
        health_file: HealthFile = None,
    ) -> None:
        async def body() -> None:
            from ..engines import make_engine
            from ..health import HealthTeller
            from ..options import parse_options
            from ..role_settings import worker_settings
            from ..this_machine import name_of
            from ..worker import run_worker

            logs.start()
            settings = worker_settings(name_of(name, role), role, domain, worker_option or [], configured("worker"))
            options = configured(engine) | parse_options(engine_option or [], "--engine-option")
            made = make_engine(engine, model, served_model_name, options)
            health = HealthTeller(settings.name, health_file)
            with metrics.served(role, settings.name):
                async with health.telling():
                    await run_worker(settings, made, broker.settings(), topology_settings(limit), stop_on_signals(), health)

        run(body, loop_factory=fast_loop())

    return command


app.command("prefill", help="Run one prefill worker: fills KV caches and hands them on.")(worker_command("prefill"))
app.command("decode", help="Run one decode worker: pulls KV caches and generates.")(worker_command("decode"))
app.command("aggregated", help="Run one worker that does both: the baseline.")(worker_command("aggregated"))
