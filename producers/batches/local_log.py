"""What the lines of a batch got, in two files on this machine: for a run without a gateway, which can be killed and started again.

Writes the output and the error file, and a third that says which lines may have been sent. Promises: a result that was recorded is on
disk, once, and whole: what a kill cut off is taken away by the next run; at the end both files are in the order of the input.
"""

import asyncio
import fcntl
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...schemas.batches import LineResult
from ...schemas.errors import SetupError
from .output import result_line

_LINE_ID = re.compile(r"batch_req_([0-9a-f]+)-(\d+)\Z")


@dataclass(frozen=True)
class Known:
    """A result that an earlier run recorded."""

    line: int
    succeeded: bool


class Appender:
    """Appends to one file. Those who append while an earlier one is written share the next wait for the disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._waiting: list[bytes] = []
        self._asked = self._written = 0
        self._turn = asyncio.Lock()

    async def append(self, line: bytes) -> None:
        """Returns when it is on disk."""
        self._waiting.append(line)
        self._asked += 1
        number = self._asked
        async with self._turn:
            if self._written >= number:
                return
            together, self._waiting = self._waiting, []
            await asyncio.shield(asyncio.to_thread(self._write, b"".join(together)))
            self._written += len(together)

    def append_now(self, line: bytes) -> None:
        """In the system's hands on return: this process may be killed, but not the machine."""
        _write_all(self._descriptor, line)

    def _write(self, data: bytes) -> None:
        _write_all(self._descriptor, data)
        os.fsync(self._descriptor)

    def drop_torn_line(self) -> None:
        """What was being written when an earlier run was killed."""
        size = os.fstat(self._descriptor).st_size
        whole = _end_of_last_line(self._descriptor, size)
        if whole < size:
            os.ftruncate(self._descriptor, whole)

    def lock(self) -> bool:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        os.close(self._descriptor)


class LocalLineLog:
    """`open` before anything else. Raises SetupError for files that are of another batch, or that another process writes."""

    def __init__(self, batch_id: str, output: Path, errors: Path) -> None:
        self._batch_id = batch_id
        self._output_path = output
        self._error_path = errors
        self._begun_path = output.with_name(f"{output.name}.begun")
        self._begun: set[int] = set()
        self._done: set[int] = set()
        self._files: list[Appender] = []

    def open(self) -> list[Known]:
        """What earlier runs recorded."""
        if self._output_path.resolve() == self._error_path.resolve():
            raise SetupError("output and errors cannot be the same file")
        try:
            self._files = [Appender(path) for path in (self._output_path, self._error_path, self._begun_path)]
        except OSError as error:
            raise SetupError(f"{error.filename} cannot be written: {error.strerror}") from error
        try:
            return self._known()
        except BaseException:
            self.close()
            raise

    def _known(self) -> list[Known]:
        """Nothing is changed before all is known to be ours."""
        if not self._files[2].lock():
            raise SetupError(f"another run writes {self._output_path}")
        known = [*self._read(self._output_path, succeeded=True), *self._read(self._error_path, succeeded=False)]
        for file in self._files:
            file.drop_torn_line()
        self._begun = {int(text) for text in self._begun_path.read_text().split()}
        self._done = {result.line for result in known}
        return known

    def has_result(self, line: int) -> bool:
        return line in self._done

    def may_be_sent(self, line: int, place: int) -> bool:
        return line in self._begun

    async def begin(self, line: int, place: int) -> None:
        self._files[2].append_now(f"{line}\n".encode())

    async def record(self, result: LineResult) -> LineResult:
        await self._files[0 if result.succeeded else 1].append(result_line(result))
        self._done.add(result.line)
        return result

    def close(self) -> None:
        """As they are: to be gone on with."""
        for file in self._files:
            file.close()
        self._files = []

    def finish(self) -> None:
        """All lines have results: the files get the order of the input. An error file without lines is taken away."""
        self.close()
        in_order(self._output_path)
        in_order(self._error_path)
        if not self._error_path.stat().st_size:
            self._error_path.unlink()
        self._begun_path.unlink()

    def _read(self, path: Path, *, succeeded: bool) -> list[Known]:
        found: list[Known] = []
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if not raw.endswith(b"\n") and self._begins_like_ours(raw):
                    break
                line = self._line_of(raw)
                if line is None:
                    raise SetupError(f"{path}, line {number}, is no result of this batch: give another file, or take that one away")
                found.append(Known(line, succeeded))
        return found

    def _begins_like_ours(self, torn: bytes) -> bool:
        beginning = f'{{"id": "batch_req_{self._batch_id.removeprefix("batch_")}-'.encode()
        return torn.startswith(beginning) or beginning.startswith(torn)

    def _line_of(self, raw: bytes) -> int | None:
        try:
            fields: Any = json.loads(raw)
            match = _LINE_ID.match(fields["id"])
        except (ValueError, KeyError, TypeError):
            return None
        if match is None or f"batch_{match[1]}" != self._batch_id:
            return None
        return int(match[2])


def in_order(path: Path) -> None:
    """Writes its lines anew in the order of their numbers, beside it, and puts that in its place."""
    places: list[tuple[int, int, int]] = []
    with path.open("rb") as source:
        offset = 0
        for raw in source:
            places.append((int(json.loads(raw)["id"].rpartition("-")[2]), offset, len(raw)))
            offset += len(raw)
        if places == sorted(places):
            return
        beside = path.with_name(f"{path.name}.new")
        with beside.open("wb") as target:
            for _, start, length in sorted(places):
                source.seek(start)
                target.write(source.read(length))
            target.flush()
            os.fsync(target.fileno())
    beside.replace(path)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _end_of_last_line(descriptor: int, size: int) -> int:
    end = size
    while end > 0:
        start = max(0, end - (64 << 10))
        at = os.pread(descriptor, end - start, start).rfind(b"\n")
        if at >= 0:
            return start + at + 1
        end = start
    return 0
