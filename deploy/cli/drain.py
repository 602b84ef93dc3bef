"""Taking one process out of service: `drain`."""

from typing import Annotated

import typer

from .common import AsJson, Broker, run, takes_broker

app = typer.Typer()


@app.command()
@takes_broker
def drain(
    broker: Broker,
    name: Annotated[str, typer.Argument(metavar="WORKER", help="The name of a worker or router.")],
    reason: Annotated[str, typer.Option(help="For its log.")] = "an operator said so",
    wait_s: Annotated[float, typer.Option(min=0.0, help="How long to wait until it has drained. 0: not at all.")] = 120.0,
    as_json: AsJson = False,
) -> None:
    """Let it finish or hand on what it has, and end. Under `jetwake up` a fresh one takes its place: a rolling restart."""

    async def body() -> None:
        from ..drain import drain as order
        from ..drain import print_drain

        print_drain(*await order(broker.settings(), name, reason, wait_s), as_json)

    run(body)
