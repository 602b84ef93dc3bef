"""A short chaos run as a person starts it: real processes, every kind of fault, and an empty list of violations."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from jetwake.deploy.chaos.plan import KINDS
from jetwake.deploy.chaos.users import refusals
from jetwake.pipeline.refusals import not_permitted

SEED = 7
SECURED = ("--servers", "3", "--secured", "--duration", "15s", "--every", "1.2")


@pytest.mark.parametrize("broker", [(), SECURED], ids=["open", "secured-cluster"])
async def test_a_short_run_with_every_fault_ends_with_a_clean_ledger(tmp_path: Path, broker: tuple[str, ...]) -> None:
    words = [
        "chaos",
        "--duration",
        "25s",
        "--every",
        "2",
        "--seed",
        str(SEED),
        "--rate",
        "5",
        "--keep",
        str(tmp_path / "kept"),
        "--json",
        *broker,
    ]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "jetwake.deploy.cli", *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, errors = await process.communicate()
    assert process.returncode in (0, 1), errors.decode()
    result = json.loads(output)
    ledger = result["ledger"]
    assert result["clean"] is True, (ledger["violations"], ledger["leftovers"], errors.decode()[-3000:])
    assert process.returncode == 0
    assert not (tmp_path / "kept").exists()
    assert set(result["faults"]) == set(KINDS)
    assert ledger["accepted"] == ledger["finished"] + ledger["failed"] + ledger["cancelled"] + ledger["expired"] > 40
    assert ledger["finished"] > ledger["accepted"] / 2


def test_what_permissions_forbade_is_counted(tmp_path: Path) -> None:
    said = not_permitted("publish", "jw.prefill.x")
    (tmp_path / "decode-1.log").write_text(f"12:00:00 WARNING decode-1: {said}\n12:00:01 ERROR again: {said}\nready\n")
    (tmp_path / "router-1.log").write_text("ready\n")
    assert refusals(tmp_path) == ["refused to decode-1, 2 times: publish to jw.prefill.x"]
