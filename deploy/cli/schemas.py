"""What is said on the wire, for other languages: `schemas`."""

from pathlib import Path
from typing import Annotated

import typer

from .common import run

app = typer.Typer()


@app.command()
def schemas(folder: Annotated[Path, typer.Argument(help="Where to write one JSON Schema for each message.")]) -> None:
    """Export the JSON Schemas of all messages."""

    async def body() -> None:
        from ...schemas.json_schema import files

        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files().items():
            (folder / name).write_text(text)

    run(body)
