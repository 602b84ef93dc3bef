"""Every `jetwake` command line in README and docs names a command and options that there are."""

import re
import shlex
from pathlib import Path

import pytest
import typer

from jetwake.deploy.cli import app

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINE = re.compile(r"^(?:    |\$ )?(?:[A-Z_]+=\S+ )*jetwake (.*?)(?:\s+#.*)?$")
INLINE = re.compile(r"`jetwake ([^`]*)`")


def command_lines() -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for document in DOCUMENTS:
        text = re.sub(r"\\\n\s*", "", document.read_text())
        in_block = [match[1] for line in text.splitlines() if (match := LINE.match(line))]
        found += [(document.name, line) for line in [*in_block, *INLINE.findall(text)]]
    return found


def test_lines_are_found() -> None:
    assert len(command_lines()) > 60


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
