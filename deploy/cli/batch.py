"""`jetwake batch`: files of requests in, files of results out; with a gateway or without one."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .common import EXIT_FAILED, EXIT_USAGE, AsJson, Broker, WhichModel, run, stop_on_signals, takes_broker

if TYPE_CHECKING:
    from ..batch_run import Summary

app = typer.Typer()

Window = Annotated[str, typer.Option("--window", help="How long it may take: 90s, 30m, 24h, 7d.")]
Tenant = Annotated[str, typer.Option("--tenant", help="Whose it is, where there are API keys.")]
BatchId = Annotated[str, typer.Argument(metavar="BATCH_ID")]


@app.command("run", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
@takes_broker
def run_here(
    context: typer.Context,
    broker: Broker,
    source: Annotated[Path, typer.Argument(metavar="IN.jsonl", help="One request in each line, as OpenAI's batch API has them.")],
    output: Annotated[Path, typer.Argument(metavar="OUT.jsonl", help="Results; an earlier run's are kept and gone on with.")],
    errors: Annotated[Path | None, typer.Option(help="Lines that failed. Else: OUT.jsonl.errors.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Lines on their way at the same time.")] = 64,
    model: WhichModel = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Folder with tokenizer and configuration. Else: the model's own.")] = None,
    window: Window = "24h",
    name: Annotated[str, typer.Option("--run-name", help="Another name asks everything anew; the same input and name go on.")] = "",
    as_json: AsJson = False,
) -> None:
    """Run a batch without a gateway. Killed or stopped, it goes on when the same command is given again: each line has one result.

    Every front-end flag of `vllm serve` is taken too. Exit code 1: some lines failed.
    """

    async def body() -> None:
        from ..batch_run import RunPlan, print_errors, print_summary, run_batch

        plan = RunPlan(
            source,
            output,
            errors or output.with_name(f"{output.name}.errors"),
            model,
            concurrency,
            window,
            name,
            tokenizer,
            tuple(context.args),
        )
        with _progress() as progress:
            summary = await run_batch(plan, broker.settings(), stop_on_signals(), progress)
        if as_json:
            print(summary.as_json())
        if summary.status == "failed":
            print_errors(summary, source)
            raise typer.Exit(EXIT_USAGE)
        print_summary(summary, plan)
        if summary.failed or summary.status == "stopped":
            raise typer.Exit(EXIT_FAILED)

    run(body)


@app.command()
@takes_broker
def submit(
    broker: Broker,
    source: Annotated[Path, typer.Argument(metavar="IN.jsonl")],
    model: WhichModel = None,
    window: Window = "24h",
    tenant: Tenant = "",
    wait: Annotated[bool, typer.Option("--wait", help="Until it has ended.")] = False,
    as_json: AsJson = False,
) -> None:
    """Give a batch to the gateways of a running system, and print its id."""

    async def body() -> None:
        from ..batch_desk import print_record, submit, wait_for_end

        record = await submit(broker.settings(), source, model, window, tenant)
        if wait:
            record = await wait_for_end(broker.settings(), record.batch_id, tenant)
        print_record(record, as_json)
        if record.status == "failed" or record.failed_lines:
            raise typer.Exit(EXIT_FAILED)

    run(body)


@app.command("list")
@takes_broker
def list_batches(broker: Broker, limit: Annotated[int, typer.Option(min=1)] = 20, tenant: Tenant = "", as_json: AsJson = False) -> None:
    """The newest batches."""

    async def body() -> None:
        from ..batch_desk import desk_of, print_record

        async with desk_of(broker.settings()) as desk:
            for record in (await desk.list_batches(tenant, None, limit))[0]:
                print_record(record, as_json)

    run(body)


@app.command()
@takes_broker
def show(broker: Broker, batch_id: BatchId, tenant: Tenant = "", as_json: AsJson = False) -> None:
    """How far one batch is."""

    async def body() -> None:
        from ..batch_desk import desk_of, print_record

        async with desk_of(broker.settings()) as desk:
            print_record(await desk.batch(tenant, batch_id), as_json)

    run(body)


@app.command()
@takes_broker
def cancel(broker: Broker, batch_id: BatchId, tenant: Tenant = "", as_json: AsJson = False) -> None:
    """End a batch; lines that are finished keep their results."""

    async def body() -> None:
        from ..batch_desk import desk_of, print_record

        async with desk_of(broker.settings()) as desk:
            print_record(await desk.cancel(tenant, batch_id), as_json)

    run(body)


@app.command()
@takes_broker
def download(
    broker: Broker,
    batch_id: BatchId,
    output: Annotated[Path, typer.Argument(metavar="OUT.jsonl")],
    errors: Annotated[Path | None, typer.Option(help="Where lines that failed go.")] = None,
    tenant: Tenant = "",
    as_json: AsJson = False,
) -> None:
    """The results of a batch that has ended."""

    async def body() -> None:
        from ..batch_desk import download, print_record

        print_record(await download(broker.settings(), batch_id, output, errors, tenant), as_json)

    run(body)


@contextmanager
def _progress() -> Generator["Callable[[Summary], None]"]:
    """On standard error, and only where somebody sees it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("lines · {task.fields[rate]:,.0f} tokens/s · {task.fields[failed]} failed ·"),
        TimeElapsedColumn(),
        TextColumn("· left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None, rate=0.0, failed=0)

        def tell(summary: "Summary") -> None:
            rate = summary.output_tokens / summary.seconds if summary.seconds else 0.0
            done = summary.completed + summary.failed
            bar.update(task, total=summary.total, completed=done, rate=rate, failed=summary.failed)

        yield tell
