"""Writes docs/chart-values.md: every value of the Helm chart with its default and what the comments of values.yaml say of it.

python -m tests.deploy.write_chart_values
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
VALUES = ROOT / "deploy" / "helm" / "jetwake" / "values.yaml"
FILE = ROOT / "docs" / "chart-values.md"
KEY = re.compile(r"^( *)([A-Za-z]\w*):\s*(.*)$")
LONGEST_DEFAULT = 90

HEAD = """# Values of the Helm chart

Made of `deploy/helm/jetwake/values.yaml` by `python -m tests.deploy.write_chart_values`. `docs/installing.md` says how they go together.

| value | default | what |
|---|---|---|
"""


def rows() -> list[tuple[str, str, str]]:
    found: list[tuple[str, str, str]] = []
    path: list[str] = []
    said: list[str] = []
    for line in VALUES.read_text().splitlines():
        stripped = line.strip()
        if stripped.startswith("# --"):
            said = [stripped.removeprefix("# --").strip()]
        elif stripped.startswith("#"):
            said.append(stripped.removeprefix("#").strip()) if said else None
        elif key := KEY.match(line):
            path = [*path[: len(key[1]) // 2], key[2]]
            if key[3] or said:
                found.append((".".join(path), key[3], " ".join(said)))
            said = []
    return found


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def text() -> str:
    lines: list[str] = []
    for name, default, what in rows():
        shown = default if len(default) <= LONGEST_DEFAULT else "see values.yaml"
        lines.append(f"| `{name}` | {f'`{cell(shown)}`' if shown else ''} | {cell(what)} |")
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
