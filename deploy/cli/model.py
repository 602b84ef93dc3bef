"""Models on this machine: `model fetch`."""

from typing import Annotated

import typer

from .common import run, say

app = typer.Typer()


@app.callback()
def group() -> None:
    """One command alone would otherwise lose its name."""


@app.command()
def fetch(name: Annotated[str, typer.Argument(help="demo, tiny, a folder, or a Hugging Face name.")] = "demo") -> None:
    """Make a model ready on this machine and print where it is."""

    async def body() -> None:
        from ..demo_model import fetch

        print(fetch(name, report=say))

    run(body)
