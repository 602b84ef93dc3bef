"""What the pipeline does now: `dashboard`, `top`, `request`."""

from typing import Annotated

import typer

from .common import AsJson, Broker, Logs, run, stop_on_signals, takes_broker, takes_logs

app = typer.Typer()


@app.command()
@takes_broker
@takes_logs
def dashboard(
    broker: Broker,
    logs: Logs,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8040,
) -> None:
    """Show the pipeline in a browser: queues, workers, times, caches, transfers, and any request. Gateways serve the same page."""

    async def body() -> None:
        from ..dashboard.serve import serve_dashboard

        logs.start()
        await serve_dashboard(broker.settings(), port, stop_on_signals(), lambda url: print(url, flush=True))

    run(body)


@app.command()
@takes_broker
def top(
    broker: Broker,
    once: Annotated[bool, typer.Option("--once", help="Print the present picture and end.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the pipeline in this terminal, live. Ctrl-C ends it."""

    async def body() -> None:
        from ..dashboard.top import show_top

        await show_top(broker.settings(), stop_on_signals(), once=once or as_json, as_json=as_json)

    run(body)


@app.command()
@takes_broker
def request(
    broker: Broker,
    request_id: Annotated[str, typer.Argument(metavar="REQUEST_ID")],
    as_json: AsJson = False,
) -> None:
    """Show where the time of one request went, where it was, and why: its waterfall and the router's reasons."""

    async def body() -> None:
        from ..dashboard.request_text import print_story, story_of

        print_story(await story_of(broker.settings(), request_id), as_json)

    run(body)
