"""One batch from its input file to its output files. Each step can be done again by whoever takes the batch over.

Reads the input file and the results recorded so far; writes the record, the results, and the two files.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ...pipeline.clock import ServerClock
from ...pipeline.connection import Bus
from ...pipeline.publish import Publisher
from ...schemas.batches import ENDED, BatchRecord, LineError
from ...schemas.errors import JetwakeError
from .crowding import Slices
from .files import FileStore
from .line_log import BusLineLog
from .lines import BodyCheck, Checked, Line, LineChecker, LineFile, split_lines
from .order import ORDER
from .output import Unrun, result_line, unrun_line
from .records import BatchStore
from .running import patiently, run_lines
from .settings import BatchSettings
from .tally import Tally
from .window import Window

if TYPE_CHECKING:
    from .runner import AskFor

logger = logging.getLogger(__name__)

TELL_EVERY_S = 1.0
"""How often counts are told, and a cancel or the end of the time is looked for."""

Ending = Literal["batch_cancelled", "batch_expired"]


class OneBatch:
    def __init__(
        self,
        batch_id: str,
        input_path: Path,
        *,
        bus: Bus,
        publisher: Publisher,
        clock: ServerClock,
        store: BatchStore,
        files: FileStore,
        window: Window,
        settings: BatchSettings,
    ) -> None:
        self._id = batch_id
        self._path = input_path
        self._bus = bus
        self._publisher = publisher
        self._clock = clock
        self._store = store
        self._files = files
        self._window = window
        self._settings = settings
        self._tally = Tally()
        self._ending: Ending | None = None

    async def run(self, knows: Callable[[str], bool], check_body: BodyCheck, ask_for: "AskFor") -> None:
        """Returns when the batch has ended. Raises what keeps it from that: then somebody goes on later."""
        record = await self._change(lambda record: record)
        if not await self._fetch_input(record):
            return
        checked = await check_lines(self._path, LineChecker(record.endpoint, self._settings.limits, knows, check_body), Slices())
        if checked.refused:
            await self._change(lambda record: failed_lines(record, checked, self._clock.now_ns()))
            return
        record = await self._change(lambda record: self._begun(record, checked))
        line_log = self._log(record)
        async for result in line_log.load():
            self._tally.add(result)
        await self._run_lines(record, checked.lines, line_log, ask_for)
        await self._finish(checked.lines, line_log)

    async def forget_lines(self) -> None:
        await BusLineLog(self._bus, self._publisher, self._id, 0, self._note_begun).forget()

    # -- steps ----------------------------------------------------------------------------------------------------------

    async def _fetch_input(self, record: BatchRecord) -> bool:
        file = await self._files.get(record.input_file_id, record.owner)
        if file is None:
            problem = LineError(code="input_file_not_found", message=f"{record.input_file_id} is gone: it was deleted or has expired")
            await self._change(lambda record: failed_lines(record, Checked(errors=[problem], refused=1), self._clock.now_ns()))
            return False
        await self._files.fetch(file, self._path)
        return True

    def _begun(self, record: BatchRecord, checked: Checked) -> BatchRecord:
        if record.in_progress_ns:
            return record
        changes = {"in_progress_ns": self._clock.now_ns(), "total_lines": len(checked.lines), "order": ORDER}
        if record.status == "validating":
            changes["status"] = "in_progress"
        return record.model_copy(update=changes)

    def _log(self, record: BatchRecord) -> BusLineLog:
        return BusLineLog(self._bus, self._publisher, self._id, record.begun if record.order == ORDER else None, self._note_begun)

    async def _note_begun(self, begun: int) -> None:
        await self._change(lambda record: record.model_copy(update={"begun": max(begun, record.begun), "order": ORDER}))

    async def _run_lines(self, record: BatchRecord, lines: Sequence[Line], line_log: BusLineLog, ask_for: "AskFor") -> None:
        """Returns when all have results, or the batch is cancelled or its time is over: then `_ending` says so."""
        self._look(record)
        source = LineFile(self._path)
        try:
            async with ask_for(record, source) as asking:
                sending = asyncio.create_task(run_lines(lines, line_log, asking, self._window, self._tally.add))
                try:
                    await self._watch(sending)
                finally:
                    asking.cancelling = self._ending is not None
                    sending.cancel()
                    await asyncio.wait([sending])
                if not sending.cancelled():
                    sending.result()
        finally:
            source.close()

    async def _watch(self, sending: "asyncio.Task[None]") -> None:
        while self._ending is None:
            done, _ = await asyncio.wait([sending], timeout=TELL_EVERY_S)
            if done:
                return
            self._look(await self._change(self._tally.into))

    def _look(self, record: BatchRecord) -> None:
        if record.status == "cancelling":
            self._ending = "batch_cancelled"
        elif self._clock.now_ns() >= record.expires_ns:
            self._ending = "batch_expired"

    async def _finish(self, lines: Sequence[Line], line_log: BusLineLog) -> None:
        record = await self._change(self._finalizing)
        with_result = [line.number for line in lines if line_log.has_result(line.number)]
        life_s = record.output_expires_s or self._settings.file_life_s
        output_id = error_id = ""
        if self._tally.completed:
            output_id = f"file-{self._id.removeprefix('batch_')}-output"
            parts = (result_line(result) async for result in line_log.results(with_result) if result.succeeded)
            await self._files.put(f"{self._id}_output.jsonl", "batch_output", record.owner, parts, life_s, output_id)
        if self._tally.failed or len(with_result) < len(lines):
            error_id = f"file-{self._id.removeprefix('batch_')}-error"
            parts = self._error_lines(lines, line_log, self._ending or "batch_expired")
            await self._files.put(f"{self._id}_error.jsonl", "batch_output", record.owner, parts, life_s, error_id)
        await self._change(lambda record: self._ended(record, output_id, error_id))
        await line_log.forget()

    def _finalizing(self, record: BatchRecord) -> BatchRecord:
        record = self._tally.into(record)
        if self._ending is None and record.status == "in_progress":
            return record.model_copy(update={"status": "finalizing", "finalizing_ns": self._clock.now_ns()})
        return record

    async def _error_lines(self, lines: Sequence[Line], line_log: BusLineLog, why: Unrun) -> AsyncGenerator[bytes]:
        """Failed ones as they failed, and those that were not run, in the order of the input."""
        failed = line_log.results(line.number for line in lines if line.number in self._tally.failed_lines)
        slices = Slices()
        for line in lines:
            await slices.pause()
            if line.number in self._tally.failed_lines:
                yield result_line(await anext(failed))
            elif not line_log.has_result(line.number):
                yield unrun_line(self._id, line.number, line.custom_id, why)

    def _ended(self, record: BatchRecord, output_id: str, error_id: str) -> BatchRecord:
        changes: dict[str, object] = {"output_file_id": output_id, "error_file_id": error_id}
        status = {"batch_cancelled": "cancelled", "batch_expired": "expired", None: "completed"}[self._ending]
        changes |= {"status": status, f"{status}_ns": self._clock.now_ns()}
        return self._tally.into(record).model_copy(update=changes)

    async def _change(self, change: Callable[[BatchRecord], BatchRecord]) -> BatchRecord:
        record = await patiently(
            lambda: self._store.change(self._id, lambda record: record if record.status in ENDED else change(record)),
            f"batch {self._id} is noted",
        )
        if record is None:
            raise JetwakeError(f"the record of batch {self._id} is gone")
        return record


def failed_lines(record: BatchRecord, checked: Checked, now_ns: int) -> BatchRecord:
    return record.model_copy(update={"status": "failed", "failed_ns": now_ns, "errors": checked.all_errors()})


def failed_for(record: BatchRecord, error: JetwakeError, now_ns: int) -> BatchRecord:
    """It could not be run."""
    if record.status in ENDED:
        return record
    problem = LineError(code=error.code, message=f"the batch could not be run: {error}")
    return record.model_copy(update={"status": "failed", "failed_ns": now_ns, "errors": [problem]})


async def check_lines(path: Path, checker: LineChecker, slices: Slices) -> Checked:
    for offset, raw in split_lines(path):
        checker.take(offset, raw)
        await slices.pause()
    return checker.finish()
