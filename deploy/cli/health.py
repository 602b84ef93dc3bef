"""Whether the process in this container is well: `jetwake health`, for probes."""

import json
import time
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer()


@app.command()
def health(
    file: Annotated[
        Path, typer.Option("--file", envvar="JETWAKE_HEALTH_FILE", help="The file that the process was given as --health-file.")
    ],
    ready: Annotated[bool, typer.Option("--ready", help="It must also take work now: started, connected, and not draining.")] = False,
) -> None:
    """Exit code 0 when the process that writes the file is well, 1 with the reason when not. Asks no broker and no port."""
    from ..health import problem_of

    try:
        text = file.read_text()
    except FileNotFoundError:
        problem = f"there is no {file}: the process has not started, or was given no --health-file"
    else:
        problem = problem_of(text, time.time(), ready)
        if not problem:
            facts = json.loads(text)
            print(f"{facts['name']}: {facts['state']}")
            return
    print(problem)
    raise typer.Exit(1)
