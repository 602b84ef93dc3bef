"""What the settings are: `config show`, `config check`, `config reference`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common import EXIT_USAGE, AsJson, run_here
from .configured import PAIRS, Config, configuration, setting_of

if TYPE_CHECKING:
    from ..configuration import Layer

app = typer.Typer()


@app.command()
def show(
    command: Annotated[list[str] | None, typer.Argument(metavar="[-- COMMAND FLAGS]", help="With the flags of this command.")] = None,
    as_json: AsJson = False,
    config: Config = None,
) -> None:
    """Every setting as it counts here, and whether a flag, the environment, the file or the default says so."""

    def body() -> None:
        import json

        from ..configuration import effective
        from ..configuration_view import print_shown, shown

        settings = configuration()
        if command:
            flags = _flags(command)
            settings = (configuration() if "--config" in command else settings).over(flags)
        rows = shown(effective(settings))
        if as_json:
            print(json.dumps({"file": str(settings.file) if settings.file else None, "settings": rows}))
        else:
            print_shown(rows, settings.file)

    run_here(body)


def _flags(words: list[str]) -> "Layer":
    """What the command line of a command says, without running it. Raises SetupError."""
    from ...schemas.errors import SetupError
    from ..configuration import Layer
    from ..options import parse_options
    from . import app as commands

    group: Any = typer.main.get_command(commands)
    if words[0] not in group.commands:
        raise SetupError(f"there is no command {words[0]}")
    context = group.commands[words[0]].make_context(words[0], words[1:])
    values: dict[str, dict[str, Any]] = {}
    flags: dict[str, str] = {}

    def say(section: str, key: str, value: Any, flag: str) -> None:
        values.setdefault(section, {})[key] = value
        flags[f"{section}.{key}"] = flag

    given = [parameter.name for parameter in context.command.params if context.get_parameter_source(parameter.name).name == "COMMANDLINE"]
    for name in given:
        flag = f"--{name.replace('_', '-')}"
        if name in PAIRS:
            for key, value in parse_options(context.params[name], flag).items():
                say(PAIRS[name] or context.params["engine"], key, value, flag)
        elif (setting := setting_of(words[0], name)) is not None:
            section, _, key = setting.partition(".")
            say(section, key, context.params[name], flag)
    if context.args:
        say("gateway", "flags", tuple(context.args), context.args[0])
    return Layer("flag", values, flags=flags)


@app.command()
def check(file: Annotated[Path, typer.Argument(help="TOML or YAML.")]) -> None:
    """Whether every key of a file is known and every value is one; exit code 2 when not."""

    def body() -> None:
        from ..configuration import Layer, complaints_about, read_file

        values = read_file(file)
        complaints = list(complaints_about(Layer("file", values, str(file))))
        if complaints:
            print(*complaints, sep="\n", file=sys.stderr)
            raise typer.Exit(EXIT_USAGE)
        print(f"{file}: {sum(map(len, values.values()))} settings, all known")

    run_here(body)


@app.command()
def reference() -> None:
    """The page of all settings, as Markdown: docs/configuration.md."""

    def body() -> None:
        from ..configuration_view import reference_page

        print(reference_page(), end="")

    run_here(body)
