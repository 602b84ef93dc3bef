"""`docs/reliability.md` says which test shows what: every fault has its row, and every test that it names exists."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAULTS = [f"F{number:02}" for number in (*range(1, 24), *range(32, 50), *range(57, 60))]
ROW = re.compile(r"^\| (F\d\d) (.*) \| (.*) \| (.*) \| (.*) \|$", re.MULTILINE)
TEST = re.compile(r"`(tests/[^`:]+)::(\w+)`")
GAPS = ("Not shown by a test:", "Not done:")

ROWS = {fault: columns for fault, *columns in ROW.findall((ROOT / "docs/reliability.md").read_text())}


@cache
def names_in(path: str) -> frozenset[str]:
    """Tests of this file, those in classes too."""
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    names = (node.name for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, functions))
    return frozenset(name for name in names if name.startswith("test_"))


def test_every_fault_has_its_row() -> None:
    assert list(ROWS) == FAULTS


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_row_names_exists(fault: str) -> None:
    *texts, shown_by = ROWS[fault]
    assert all(texts), "an empty column"
    named = TEST.findall(shown_by)
    assert named or any(gap in shown_by for gap in GAPS), "neither a test nor a word that there is none"
    for path, name in named:
        assert name in names_in(path), f"{path} has no {name}"
    assert len(named) == shown_by.count("`tests/"), "a test that is not written as `tests/file.py::test_name`"
