"""What could not be processed: `dead list`, `dead show`, `dead retry`."""

from typing import Annotated

import typer

from .common import EXIT_FAILED, AsJson, Broker, run, takes_broker

app = typer.Typer()

Letter = Annotated[int, typer.Argument(metavar="ID", help="The number that `jetwake dead list` shows.")]


@app.command("list")
@takes_broker
def list_letters(broker: Broker, as_json: AsJson = False) -> None:
    """All dead letters, oldest first."""

    async def body() -> None:
        from ..dead import list_dead, print_list

        print_list(await list_dead(broker.settings()), as_json)

    run(body)


@app.command()
@takes_broker
def show(broker: Broker, letter: Letter, as_json: AsJson = False) -> None:
    """All that is known of one letter."""

    async def body() -> None:
        from ..dead import print_one, show_dead

        print_one(await show_dead(broker.settings(), letter), as_json)

    run(body)


@app.command()
@takes_broker
def retry(
    broker: Broker,
    letters: Annotated[list[int], typer.Argument(metavar="ID...", help="Numbers that `jetwake dead list` shows.")],
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the answers and print them.")] = False,
    as_json: AsJson = False,
) -> None:
    """Send requests again, as new ones. A letter goes once its request is stored; one that holds no request stays."""

    async def body() -> None:
        from ..dead import print_retried, retry_dead

        outcomes = await retry_dead(broker.settings(), letters, wait)
        print_retried(outcomes, as_json)
        if any("error" in facts for facts in outcomes):
            raise typer.Exit(EXIT_FAILED)

    run(body)
