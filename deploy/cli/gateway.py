"""`jetwake gateway`: the OpenAI API over HTTP."""

import secrets
import sys
from pathlib import Path
from typing import Annotated

import typer

from .common import Broker, HealthFile, Limits, Logs, fast_loop, run, stop_on_signals, takes_broker, takes_logs, topology_settings
from .configured import configured

app = typer.Typer()


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
@takes_broker
@takes_logs
def gateway(
    context: typer.Context,
    broker: Broker,
    logs: Logs,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen on; beyond loopback only when you say so.")] = "127.0.0.1",
    model: Annotated[str | None, typer.Option(help="The name its workers serve it under. Else: the only one there is.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Folder with tokenizer and configuration. Else: the model's own.")] = None,
    name: Annotated[str, typer.Option(help="This gateway's name, unique among all. Else: a random one.")] = "",
    admin_port: Annotated[int, typer.Option(min=0, max=65535, help="Metrics, health and the live page; 0: any free one.")] = 0,
    admin_host: Annotated[str, typer.Option(help="Address of the admin port.")] = "127.0.0.1",
    dashboard_nkey_file: Annotated[
        Path | None, typer.Option(help="Seed of the observer, for the live page, where the broker has users.")
    ] = None,
    keep_alive_s: Annotated[float, typer.Option(min=0.0, help="A silent stream gets a comment this often; 0: never.")] = 10.0,
    resume_grace_s: Annotated[
        float, typer.Option(min=0.0, help="How long a broken stream goes on for whoever resumes it. 0: cancel at once, and resume none.")
    ] = 5.0,
    request_timeout_s: Annotated[float, typer.Option(min=0.1, help="Deadline of every request.")] = 600.0,
    api_keys: Annotated[
        Path | None, typer.Option(help="File of API keys (YAML, or JSON lines), beside those of `jetwake keys`. Without any key: open.")
    ] = None,
    allow_open: Annotated[bool, typer.Option("--allow-open", help="Listen beyond loopback without any API key.")] = False,
    quota_replicas: Annotated[int, typer.Option(min=1, help="Gateways that serve the same tenants: each grants its part.")] = 1,
    over_nats: Annotated[bool, typer.Option("--over-nats/--no-over-nats", help="Serve requests and jobs on NATS subjects too.")] = True,
    job_timeout_s: Annotated[float, typer.Option(min=0.1, max=86_400.0, help="For durable jobs that name none.")] = 86_400.0,
    batch_option: Annotated[
        list[str] | None,
        typer.Option("--batch-option", help="KEY=VALUE of how batches are run: `--batch-option lines_at_once=64`. Repeatable."),
    ] = None,
    limit: Limits = None,
    health_file: HealthFile = None,
    ready_file: Annotated[Path | None, typer.Option(help="Write the URLs there, as JSON, once it serves.")] = None,
) -> None:
    """Serve the OpenAI API over HTTP: `jetwake gateway --port 8000 --tool-call-parser hermes --enable-auto-tool-choice`.

    Every front-end flag of `vllm serve` is taken too, as it is written there.
    """

    async def body() -> None:
        from ...pipeline.telemetry import telemetry
        from ...producers.gateway.settings import GatewaySettings
        from ..demo_model import fetch
        from ..gateway import run_gateway
        from ..gateway_batches import batch_settings
        from ..health import HealthTeller
        from ..role_settings import built

        logs.start()
        settings = built(
            GatewaySettings,
            "gateway",
            configured("gateway"),
            "",
            [],
            name=name or broker.settings().name or f"gateway-{secrets.token_hex(6)}",
            host=host,
            port=port,
            admin_host=admin_host,
            admin_port=admin_port,
            dashboard_nkey_file=dashboard_nkey_file,
            model=model,
            tokenizer=fetch(str(tokenizer)) if tokenizer is not None else None,
            request_timeout_s=request_timeout_s,
            keep_alive_s=keep_alive_s,
            resume_grace_s=resume_grace_s,
            batches=batch_settings(batch_option or [], configured("batches")),
            ready_file=ready_file,
            api_keys=api_keys,
            allow_open=allow_open,
            quota_replicas=quota_replicas,
            over_nats=over_nats,
            job_timeout_s=job_timeout_s,
            flags=(*configured("gateway").get("flags", ()), *context.args),
        )

        def say_ready(url: str, admin_url: str) -> None:
            print(f"metrics and health on {admin_url}, live page on {admin_url}/dashboard", file=sys.stderr, flush=True)
            print(f"ready {url}", flush=True)

        health = HealthTeller(settings.name, health_file)
        with telemetry("gateway", settings.name, keeps_text=True) as told:
            async with health.telling():
                broker_settings, topology = broker.settings(), topology_settings(limit)
                await run_gateway(settings, broker_settings, topology, stop_on_signals(), say_ready, health, told.metrics_text)

    run(body, loop_factory=fast_loop())
