"""What a check found, and how findings are shown. Pure but for printing."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

State = Literal["ok", "warning", "wrong", "skipped"]
SIGNS: dict[State, str] = {"ok": "✓", "warning": "!", "wrong": "✗", "skipped": "-"}
STYLES: dict[State, str] = {"ok": "green", "warning": "yellow", "wrong": "red", "skipped": "dim"}


@dataclass(frozen=True)
class Finding:
    """`what` was looked at, what was `found`, and the `cure` in one line where something is to be done."""

    what: str
    state: State
    found: str
    cure: str = ""


def is_wrong(findings: Iterable[Finding]) -> bool:
    return any(finding.state == "wrong" for finding in findings)


def print_findings(findings: Sequence[Finding], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"ok": not is_wrong(findings), "findings": [asdict(finding) for finding in findings]}))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        found = Text(finding.found, style="dim" if finding.state == "skipped" else "")
        if finding.cure:
            found.append(f"\n{finding.cure}", style=STYLES[finding.state])
        table.add_row(Text(SIGNS[finding.state], style=STYLES[finding.state]), finding.what, found)
    console = Console(highlight=False)
    console.print(table)
    wrong, warned = (sum(finding.state == state for finding in findings) for state in ("wrong", "warning"))
    console.print(f"\n{wrong} wrong, {warned} to look at" if wrong or warned else "\nall well")
