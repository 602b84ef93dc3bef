"""The `jetwake` command: one module for each group of commands, joined here. Every module has a typer `app`."""

import os
from typing import Annotated

import typer

from ...consumers.parent_death import die_with_parent
from . import (
    attach,
    batch,
    bench,
    chaos,
    config,
    dead,
    doctor,
    drain,
    gateway,
    health,
    keys,
    local,
    look,
    model,
    nats,
    probe,
    profile,
    replay,
    requests,
    roles,
    schemas,
    size,
    trace,
)

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="Queue-first, disaggregated LLM inference."
)
for group in (local, gateway, roles, requests, look, attach, drain, doctor, probe, health, schemas, chaos, replay, size, profile):
    app.add_typer(group.app)
app.add_typer(model.app, name="model", no_args_is_help=True, help="Models on this machine.")
app.add_typer(config.app, name="config", no_args_is_help=True, help="Settings: what counts, and why.")
app.add_typer(keys.app, name="keys", no_args_is_help=True, help="Who may use the gateways, and how much.")
app.add_typer(batch.app, name="batch", no_args_is_help=True, help="Files of requests in, files of results out.")
app.add_typer(nats.app, name="nats", no_args_is_help=True, help="A broker of your own: users, certificates, configuration, streams.")
app.add_typer(dead.app, name="dead", no_args_is_help=True, help="What could not be processed.")
app.add_typer(trace.app, name="trace", no_args_is_help=True, help="Workloads as files.")
app.add_typer(bench.app, name="bench", no_args_is_help=True, help="Measure this installation.")


def _say_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"jetwake {version('jetwake')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", is_eager=True, callback=_say_version, help="Show the version and exit.")] = False,
) -> None:
    pass


def main() -> None:
    parent = os.environ.pop("_JETWAKE_PARENT_PID", "")
    if parent.isdigit():
        die_with_parent(int(parent))
    app()
