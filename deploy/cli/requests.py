"""One request and what became of it: `ask`, `explain`, `status`."""

import os
from typing import Annotated, Any

import typer

from .common import AsJson, Broker, Raw, WhichModel, run, takes_broker

app = typer.Typer()


@app.command()
@takes_broker
def ask(
    broker: Broker,
    prompt: Annotated[str, typer.Argument()],
    model: WhichModel = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Else 256, or what the model's context leaves.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token each time; the API's own default is 1.")] = 0.0,
    seed: Annotated[int | None, typer.Option()] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text. Repeatable.")] = None,
    raw: Raw = False,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="Deadline of the request.")] = 600.0,
    as_json: AsJson = False,
) -> None:
    """Ask one question; the answer streams, then one line says how it was made."""

    async def body() -> None:
        from ...pipeline.telemetry import telemetry
        from ..ask import ask_once, print_answer, print_json

        options: dict[str, Any] = {"temperature": temperature, "seed": seed, "stop": stop or [], "timeout_s": timeout_s}
        if max_tokens is not None:
            options["max_tokens"] = max_tokens
        with telemetry("client", f"ask-{os.getpid()}"):
            answer = await ask_once(broker.settings(), prompt, model, options, raw=raw, show=not as_json)
        print_json(answer) if as_json else print_answer(answer)

    run(body)


@app.command()
@takes_broker
def explain(
    broker: Broker,
    subject: Annotated[str, typer.Argument(metavar="PROMPT|REQUEST_ID", help="A prompt, or the id of a request that was routed.")],
    model: WhichModel = None,
    raw: Raw = False,
    as_json: AsJson = False,
) -> None:
    """Why a request went where it went, or where a prompt would go now: every candidate with its score."""

    async def body() -> None:
        from ..explain import explain as ask_router
        from ..explain import print_explanation

        print_explanation(await ask_router(broker.settings(), subject, model, raw), as_json)

    run(body)


@app.command()
@takes_broker
def status(broker: Broker, as_json: AsJson = False) -> None:
    """Workers, queues and what is in flight."""

    async def body() -> None:
        from ..status import print_status, read_status

        print_status(await read_status(broker.settings()), as_json)

    run(body)
