"""What README and docs tell to type, and where they point: commands, options and their values, make targets, chart values, files."""

import re
import shlex
from pathlib import Path

import pytest
import typer
import yaml

from jetwake.deploy.cli import app

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
LINE = re.compile(r"^(?:    |\$ )?(?:[A-Z_]+=\S+ )*jetwake (.*?)(?:\s+#.*)?$")
INLINE = re.compile(r"`jetwake ([^`]*)`")


TARGET = re.compile(r"(?:^    |`)make ([a-z]+)", re.MULTILINE)
SET = re.compile(r"--set ([\w.]+)=")
POINTED_AT = re.compile(r"`((?:deploy|docs|tests|schemas|pipeline|producers|consumers)/[\w./-]+)|\]\((?!https?:)([\w./-]+)\)")


def text_of(document: Path) -> str:
    return re.sub(r"\\\n\s*", "", document.read_text())


def lines_in_blocks() -> list[tuple[str, str]]:
    return [(document.name, match[1]) for document in DOCUMENTS for line in text_of(document).splitlines() if (match := LINE.match(line))]


def command_lines() -> list[tuple[str, str]]:
    return [*lines_in_blocks(), *((document.name, line) for document in DOCUMENTS for line in INLINE.findall(text_of(document)))]


def test_lines_are_found() -> None:
    assert len(lines_in_blocks()) > 60
    assert len(command_lines()) > 150


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_make_targets_chart_values_and_files_are_there(document: Path) -> None:
    text = text_of(document)
    targets = set(re.findall(r"(?m)^([a-z]+):", (ROOT / "Makefile").read_text()))
    assert set(TARGET.findall(text)) <= targets
    values = yaml.safe_load((ROOT / "deploy/helm/jetwake/values.yaml").read_text())
    for path in SET.findall(text):
        value = values
        for key in path.split("."):
            assert key in value, f"{path} is no value of the chart"
            value = value[key]
    pointed = [named or str((document.parent / linked).relative_to(ROOT)) for named, linked in POINTED_AT.findall(text)]
    assert [path for path in pointed if not (ROOT / path).exists()] == []


@pytest.mark.parametrize(("document", "line"), lines_in_blocks())
def test_what_is_to_be_typed_is_taken(document: str, line: str) -> None:
    """With its values, as far as they can be told without running it."""
    words = shlex.split(re.split(r"[;&>]| \| ", line)[0])
    command, name = typer.main.get_command(app), "jetwake"
    while hasattr(command, "commands") and words[0] in command.commands:
        name = words.pop(0)
        command = command.commands[name]
    command.make_context(name, words)


@pytest.mark.parametrize(("document", "line"), command_lines())
def test_it_is_real(document: str, line: str) -> None:
    words = shlex.split(re.split(r"[;&>]| \| ", line)[0])
    commands = [typer.main.get_command(app)]
    while words and hasattr(commands[-1], "commands"):
        if words[0] in ("COMMAND", "--help"):
            return
        names = words.pop(0).split("|")
        group = commands[-1].commands
        missing = [name for name in names if name not in group]
        assert not missing, f"{document}: there is no command {missing}"
        commands.append(group[names[0]])
    command = commands[-1]
    known = {option for parameter in command.params for option in [*parameter.opts, *parameter.secondary_opts]} | {"--help"}
    if command.context_settings.get("ignore_unknown_options"):
        return  # it passes them on to vLLM
    given = words[: words.index("--")] if "--" in words else words
    unknown = [
        word.split("=")[0] for word in given if word.startswith("-") and word.split("=")[0] not in known and not word.lstrip("-").isdigit()
    ]
    assert not unknown, f"{document}: jetwake {line}: there is no option {unknown}"
