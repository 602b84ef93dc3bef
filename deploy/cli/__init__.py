"""The `jetwake` command: one module for each group of commands, joined here. Every module has a typer `app`."""

import os

import typer

from ..parent_death import die_with_parent
from . import bench, local, model, requests, roles, schemas

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="Queue-first, disaggregated LLM inference."
)
for group in (local, roles, requests, schemas):
    app.add_typer(group.app)
app.add_typer(model.app, name="model", no_args_is_help=True, help="Models on this machine.")
app.add_typer(bench.app, name="bench", no_args_is_help=True, help="Measure this installation.")


def main() -> None:
    parent = os.environ.pop("JETWAKE_PARENT_PID", "")
    if parent.isdigit():
        die_with_parent(int(parent))
    app()
