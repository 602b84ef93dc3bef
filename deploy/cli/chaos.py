"""`jetwake chaos`: faults at random on a live system under load, and the accounts of it."""

from pathlib import Path
from typing import Annotated

import typer

from .common import EXIT_FAILED, AsJson, EngineOptions, Policy, run, say, stop_on_signals

app = typer.Typer()

UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0}
SIMULATED_OPTIONS = ("timing=dynamo-default", "num_blocks=1024", "slots=32")
VLLM_OPTIONS = ("max_num_seqs=16", "dtype=float32")


def seconds(text: str) -> float:
    """`90`, `90s`, `10m`, `1h`. Raises typer.BadParameter."""
    number, unit = (text[:-1], text[-1]) if text[-1:] in UNITS_S else (text, "s")
    try:
        value = float(number) * UNITS_S[unit]
    except ValueError:
        raise typer.BadParameter(f"a duration is a number with s, m or h, like 10m; not {text!r}") from None
    if value <= 0:
        raise typer.BadParameter("a duration must be above 0")
    return value


@app.command()
def chaos(
    duration: Annotated[str, typer.Option(help="How long there are load and faults: 90s, 10m, 1h.")] = "10m",
    seed: Annotated[int, typer.Option(help="Of faults and requests. The same seed plans the same run.")] = 0,
    engine: Annotated[str, typer.Option("--engine", help="simulated (every token is checked), or vllm.")] = "simulated",
    model: Annotated[str, typer.Option("--model", help="For vllm: tiny, demo, a folder, or a Hugging Face name.")] = "tiny",
    prefill: Annotated[int, typer.Option(min=0, help="Prefill workers.")] = 2,
    decode: Annotated[int, typer.Option(min=0, help="Decode workers.")] = 2,
    aggregated: Annotated[int, typer.Option(min=0, help="Aggregated workers.")] = 0,
    routers: Annotated[int, typer.Option(min=1)] = 2,
    servers: Annotated[int, typer.Option(min=1, max=5, help="NATS servers. Three are a cluster with every stream on all of them.")] = 1,
    secured: Annotated[
        bool,
        typer.Option("--secured", help="The broker has users with the permissions of their roles, over TLS, as `jetwake nats` makes it."),
    ] = False,
    clients: Annotated[int, typer.Option(min=1)] = 3,
    rate: Annotated[float | None, typer.Option(min=0.01, help="Requests per second. Else 6 simulated, 2 with vLLM.")] = None,
    every: Annotated[float | None, typer.Option(min=0.1, help="Seconds between faults, about. Else 3 simulated, 12 with vLLM.")] = None,
    faults: Annotated[str, typer.Option(help="Which, with commas between. Else all kinds.")] = "",
    settle: Annotated[str, typer.Option(help="Within this everything must end once the faults are over.")] = "60s",
    policy: Policy = "kv_aware",
    engine_option: EngineOptions = None,
    keep: Annotated[Path | None, typer.Option(help="Folder for details and logs of a violation. Else ./chaos-SEED.")] = None,
    as_json: AsJson = False,
) -> None:
    """Break a live system at random under load; the last line says what became of every request. Exit code 1: something was violated.

    Faults: kill, freeze, partition, client-cut, messages (lost, doubled, reordered), broker-stop, broker-kill, consumer, stream.
    """
    duration_s, settle_s = seconds(duration), seconds(settle)

    async def body() -> None:
        from ..chaos.plan import kinds_named
        from ..chaos.run import ChaosSettings, print_chaos, run_chaos
        from ..chaos.system import Shape

        is_simulated = engine == "simulated"
        options = [*(SIMULATED_OPTIONS if is_simulated else VLLM_OPTIONS), *(engine_option or [])]
        name = "chaos" if is_simulated else model
        settings = ChaosSettings(
            shape=Shape(engine, name, prefill, decode, aggregated, routers, clients, options, policy, servers=servers, secured=secured),
            seed=seed,
            duration_s=duration_s,
            rate_per_s=rate or (6.0 if is_simulated else 2.0),
            every_s=every or (3.0 if is_simulated else 12.0),
            kinds=kinds_named(faults),
            settle_s=settle_s,
            keep=keep or Path(f"chaos-{seed}"),
        )
        result = await run_chaos(settings, stop_on_signals(), say)
        print_chaos(result, as_json)
        if not result.is_clean:
            raise typer.Exit(EXIT_FAILED)

    run(body)
