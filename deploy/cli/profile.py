"""Measure how fast a system's engines are: `profile`."""

from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common import AsJson, Broker, EngineOptions, run, say, takes_broker

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from ...pipeline.settings import BrokerSettings

app = typer.Typer()

READY_TIMEOUT_S = 900.0
_LENGTHS_HELP = "Lengths of uncached prompts, with commas between. Else: 64, 128, ... 4096, as far as the model goes."


@app.command()
@takes_broker
def profile(
    broker: Broker,
    output: Annotated[Path, typer.Option(help="The profile, for every --profile.")] = Path("profile.json"),
    engine: Annotated[
        str, typer.Option("--engine", help="Start one prefill and one decode worker of this engine. Else: the running system.")
    ] = "",
    model: Annotated[
        str | None, typer.Option("--model", help="Which one to measure; with --engine: demo, tiny, a folder, a hub name.")
    ] = None,
    engine_option: EngineOptions = None,
    lengths: Annotated[str, typer.Option(help=_LENGTHS_HELP)] = "",
    batches: Annotated[str, typer.Option(help="Answers decoded at a time.")] = "1,2,4,8",
    contexts: Annotated[str, typer.Option(help="Prompt lengths of those answers. Else: 32 and 1024.")] = "",
    steps: Annotated[int, typer.Option(min=8, help="Tokens of each of those answers.")] = 24,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each point; the median counts.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Measure prefills and decode steps of a live system, fit a timing profile, and show how well it fits.

    The system should be idle otherwise.
    """

    async def body() -> None:
        from ..capacity.profile_file import write_profile
        from ..measure_profile import ProfilePlan, measure_profile, print_profiled

        plan = ProfilePlan(
            model=model or ("demo" if engine else None),
            lengths=_numbers(lengths, "--lengths"),
            batches=_numbers(batches, "--batches"),
            contexts=_numbers(contexts, "--contexts"),
            steps=steps,
            repeats=repeats,
        )
        async with _system(broker, engine, plan.model or "", engine_option or []) as settings:
            profiled = await measure_profile(settings, plan, output.stem, say)
        write_profile(output, profiled.fitted)
        if as_json:
            print(profiled.fitted.model_dump_json())
        else:
            print_profiled(profiled)
            say(f"written to {output}")

    run(body)


@asynccontextmanager
async def _system(broker: Broker, engine: str, model: str, options: list[str]) -> "AsyncGenerator[BrokerSettings]":
    if not engine:
        yield broker.settings()
        return
    from ..bench_system import BenchSystem, running

    say(f"starting one prefill and one decode worker: {engine}, {model}")
    own: dict[str, Any] = {"prefill": 1, "decode": 1, "prefill_options": options, "decode_options": options}
    async with running(BenchSystem(engine, model, "least_loaded", **own, ready_timeout_s=READY_TIMEOUT_S), say) as started:
        yield started.broker


def _numbers(text: str, option: str) -> list[int]:
    from ...schemas.errors import SetupError

    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdigit() and int(part) for part in parts):
        raise SetupError(f"{option} takes whole numbers from 1 up, with commas between, not {text!r}")
    return [int(part) for part in parts]
