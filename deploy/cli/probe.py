"""How fast the links between workers are: `probe`."""

from pathlib import Path
from typing import Annotated

import typer

from .common import EXIT_FAILED, AsJson, Broker, WhichModel, run, say, takes_broker

app = typer.Typer()


@app.command()
@takes_broker
def probe(
    broker: Broker,
    model: WhichModel = None,
    slow: Annotated[float, typer.Option(min=0.0, max=1.0, help="A link is slow below this share of the median of all.")] = 0.5,
    force: Annotated[
        bool, typer.Option("--force", help="Also while workers are busy: what they do and what is measured both suffer.")
    ] = False,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="Write what was measured, for `jetwake replay --links FILE`.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the link from each prefill worker to each decode worker by real NIXL transfers. Exit code 1 when one is broken.

    Each worker lays out 16 MiB of its own for it and frees them after; their engines are not touched. Pairs are measured one after the other.
    """

    async def body() -> None:
        from ..probe import print_probed
        from ..probe import probe as measure
        from ..probe import save as write

        pairs = await measure(broker.settings(), model, slow, force, say)
        print_probed(pairs, as_json)
        if save is not None:
            write(save, pairs)
        if any(pair.state == "broken" for pair in pairs):
            raise typer.Exit(EXIT_FAILED)

    run(body)
