"""What is said on the wire, for other languages: `schemas`."""

from pathlib import Path
from typing import Annotated

import typer

from .common import run

app = typer.Typer()


@app.command()
def schemas(folder: Annotated[Path, typer.Argument(help="Where to write them.")]) -> None:
    """Write one JSON Schema for each message, and the AsyncAPI document of the subjects (asyncapi.json, asyncapi.yaml)."""

    async def body() -> None:
        import yaml

        from ...schemas import asyncapi
        from ...schemas.json_schema import files

        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files().items():
            (folder / name).write_text(text)
        (folder / "asyncapi.json").write_text(asyncapi.text())
        (folder / "asyncapi.yaml").write_text(yaml.safe_dump(asyncapi.document(), sort_keys=False, allow_unicode=True, width=120))

    run(body)
