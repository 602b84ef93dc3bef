"""Is everything here as it must be: `doctor`."""

from pathlib import Path
from typing import Annotated

import typer

from .common import EXIT_FAILED, AsJson, Broker, Limits, run, takes_broker, topology_settings

app = typer.Typer()


@app.command()
@takes_broker
def doctor(
    broker: Broker,
    role: Annotated[str, typer.Option(help="Only what this needs: router, prefill, decode, aggregated, gateway, client or up.")] = "",
    model: Annotated[str | None, typer.Option(help="Look at its files too: demo, tiny, a folder, a Hugging Face name.")] = None,
    store: Annotated[Path | None, typer.Option(help="Where `jetwake up` will keep its data. Else: the folder for temporary files.")] = None,
    limit: Limits = None,
    as_json: AsJson = False,
) -> None:
    """Check this machine, its packages and the broker, and say what mends what is wrong. Exit code 1 when anything is."""

    async def body() -> None:
        import logging

        from ...schemas.errors import BrokerUnavailable
        from ..doctor.finding import is_wrong, print_findings
        from ..doctor.run import Examined, examine

        logging.getLogger("jetwake").addHandler(logging.NullHandler())  # what goes wrong is told as a finding
        try:
            settings = broker.settings()
        except BrokerUnavailable:
            settings = None
        findings = await examine(Examined(role, settings, topology_settings(limit), model, store))
        print_findings(findings, as_json)
        if is_wrong(findings):
            raise typer.Exit(EXIT_FAILED)

    run(body)
