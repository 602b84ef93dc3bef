"""The output files of a run without a gateway: what a kill leaves, and what the next run makes of it."""

import asyncio
import json
from pathlib import Path

import pytest

from jetwake.producers.batches.local_log import Appender, LocalLineLog
from jetwake.schemas.batches import LineResult
from jetwake.schemas.errors import SetupError

BATCH = "batch_" + "a" * 32


def result(line: int, status: int = 200) -> LineResult:
    body = json.dumps({"usage": {"completion_tokens": line}}).encode()
    return LineResult(batch_id=BATCH, line=line, custom_id=f"id-{line}", request_id=f"{BATCH}-{line}", status=status, body=body)


def log_in(folder: Path, batch_id: str = BATCH) -> LocalLineLog:
    return LocalLineLog(batch_id, folder / "out.jsonl", folder / "err.jsonl")


def custom_ids(path: Path) -> list[str]:
    return [json.loads(line)["custom_id"] for line in path.read_text().splitlines()]


async def test_a_run_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    first = log_in(tmp_path)
    assert first.open() == []
    for line in (3, 1, 4, 2):
        assert not first.may_be_sent(line, 0)
        await first.begin(line, 0)
    await asyncio.gather(first.record(result(3)), first.record(result(1)), first.record(result(4, 400)))
    first.close()
    with (tmp_path / "out.jsonl").open("ab") as torn:
        torn.write(b'{"id": "batch_req_' + b"a" * 32 + b'-2", "custom_id": "id-2", "resp')
    second = log_in(tmp_path)
    known = second.open()
    assert {(found.line, found.succeeded) for found in known} == {(3, True), (1, True), (4, False)}
    assert [second.has_result(line) for line in (1, 2, 3, 4, 5)] == [True, False, True, True, False]
    assert second.may_be_sent(2, 0)
    assert not second.may_be_sent(5, 0)
    await second.record(result(2))
    second.finish()
    assert custom_ids(tmp_path / "out.jsonl") == ["id-1", "id-2", "id-3"]
    assert custom_ids(tmp_path / "err.jsonl") == ["id-4"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["err.jsonl", "out.jsonl"]


async def test_files_of_something_else_are_left_alone(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    log.open()
    await log.record(result(1))
    with pytest.raises(SetupError, match="another run"):
        log_in(tmp_path).open()
    log.close()
    with pytest.raises(SetupError, match="no result of this batch"):
        log_in(tmp_path, "batch_" + "b" * 32).open()
    (tmp_path / "err.jsonl").write_text("notes\n")
    before = (tmp_path / "out.jsonl").read_bytes()
    with pytest.raises(SetupError, match="line 1"):
        log_in(tmp_path).open()
    assert (tmp_path / "out.jsonl").read_bytes() == before
    assert (tmp_path / "err.jsonl").read_text() == "notes\n"


async def test_lines_that_are_appended_together_are_all_there(tmp_path: Path) -> None:
    file = Appender(tmp_path / "x")
    lines = [f"{number} {'y' * number}\n".encode() for number in range(300)]
    await asyncio.gather(*(file.append(line) for line in lines))
    file.close()
    assert sorted((tmp_path / "x").read_bytes().splitlines(keepends=True)) == sorted(lines)
