"""Read on in an answer that was asked for before: `attach`."""

from typing import Annotated

import typer

from .common import AsJson, Broker, run, takes_broker

app = typer.Typer()


@app.command()
@takes_broker
def attach(
    broker: Broker,
    request_id: Annotated[str, typer.Argument(metavar="REQUEST_ID")],
    after: Annotated[int, typer.Option(min=0, help="Tokens you have already: the answer continues after them.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Read an answer from any token on, running or ended, on any machine. Leaving does not cancel it."""

    async def body() -> None:
        from ..attach import attach_to, print_attached, print_json

        answer = await attach_to(broker.settings(), request_id, after, show=not as_json)
        print_json(answer, after) if as_json else print_attached(answer)

    run(body)
