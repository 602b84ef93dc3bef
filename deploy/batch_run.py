"""`jetwake batch run`: a file of requests in, a file of results out, without a gateway: the OpenAI layer runs in this process.

Can be killed and run again: what has a result stays as it is, and what was sent is waited for and not sent again.
"""

import asyncio
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..pipeline.catalogue import ModelCatalogue
from ..pipeline.clock import ServerClock
from ..pipeline.connection import Bus
from ..pipeline.publish import Publisher
from ..pipeline.replies import ReplyInbox
from ..pipeline.settings import BrokerSettings
from ..producers.batches.crowding import Slices
from ..producers.batches.desk import window_s
from ..producers.batches.lines import BatchLimits, Checked, LineChecker, LineFile
from ..producers.batches.local_log import Known, LocalLineLog
from ..producers.batches.one_batch import check_lines
from ..producers.batches.running import run_lines
from ..producers.batches.tally import Tally
from ..producers.batches.window import Window
from ..producers.gateway.settings import GatewaySettings
from ..producers.gateway.submission import Submitter
from ..schemas.batches import BatchRecord, LineError, LineResult
from ..schemas.errors import SetupError
from ..schemas.subjects import BATCHES
from .gateway import wait_for_model

MAX_LINES = 10_000_000
_WHOLE_FILE = 1 << 50


@dataclass(frozen=True)
class RunPlan:
    """`name` mixed into the ids of the requests: another one asks everything anew. `flags`: those of `vllm serve`."""

    input: Path
    output: Path
    errors: Path
    model: str | None = None
    lines_at_once: int = 64
    window: str = "24h"
    name: str = ""
    tokenizer: Path | None = None
    flags: tuple[str, ...] = ()


@dataclass
class Summary:
    """What became of it. `status`: completed, failed (the input was refused) or stopped."""

    batch_id: str
    status: str = "completed"
    total: int = 0
    completed: int = 0
    failed: int = 0
    resumed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0
    errors: list[LineError] = field(default_factory=list[LineError])

    def as_json(self) -> str:
        fields: dict[str, Any] = asdict(self) | {"errors": [error.model_dump() for error in self.errors]}
        return json.dumps(fields)


Progress = Callable[[Summary], None]


async def run_batch(plan: RunPlan, broker: BrokerSettings, stopping: asyncio.Event, progress: Progress) -> Summary:
    """Raises SetupError for files and options, BusErrors for a broker that is not there. `progress` hears of every line."""
    if not plan.input.is_file():
        raise SetupError(f"{plan.input} is not there")
    async with Bus.connect(broker, name="batch-run") as bus:
        publisher, clock = Publisher(bus), ServerClock(bus)
        await clock.sync()
        settings = GatewaySettings(name="batch-run", model=plan.model, tokenizer=plan.tokenizer, flags=plan.flags, model_timeout_s=30.0)
        card = await wait_for_model(ModelCatalogue(bus, publisher), settings, stopping)
        if card is None:
            return Summary("", status="stopped")

        from ..producers.gateway.application import prepare_environment, source_of

        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # this is somebody's terminal, and no log
        prepare_environment(source_of(card, settings))

        from ..producers.gateway.offline import open_offline  # imports vLLM: seconds

        # Its own inbox stays empty: the replies of a batch come under a name for batches.
        submitter = Submitter(bus, publisher, ReplyInbox(bus, "batch-run", clock), clock, card)
        offline = await open_offline(settings, submitter)
        try:
            run = _Run(plan, bus, publisher, clock, progress)
            ending = asyncio.create_task(run.go(offline.app, card.model, offline.names))
            stop, failed = asyncio.create_task(stopping.wait()), asyncio.create_task(bus.failed())
            await asyncio.wait([ending, stop, failed], return_when=asyncio.FIRST_COMPLETED)
            for task in (ending, stop, failed):
                task.cancel()
            await asyncio.wait([ending, stop, failed])
            if ending.cancelled():
                if failed.done() and not failed.cancelled():
                    failed.result()
                run.summary.status = "stopped"
                return run.summary
            return ending.result()
        finally:
            offline.close()


class _Run:
    def __init__(self, plan: RunPlan, bus: Bus, publisher: Publisher, clock: ServerClock, progress: Progress) -> None:
        self.summary = Summary("")
        self._plan = plan
        self._bus = bus
        self._publisher = publisher
        self._clock = clock
        self._progress = progress
        self._tally = Tally()
        self._started_s = time.perf_counter()

    async def go(self, app: Any, model: str, names: Sequence[str]) -> Summary:
        from ..producers.gateway.batch_lines import asking_for, body_check
        from ..producers.gateway.body_models import refused_body

        plan = self._plan
        limits = BatchLimits(max_lines=MAX_LINES, max_file_bytes=_WHOLE_FILE)
        checker = LineChecker("", limits, frozenset(names).__contains__, body_check(refused_body))
        checked = await check_lines(plan.input, checker, Slices(rest_s=0))
        batch_id = await asyncio.to_thread(batch_id_of, plan.input, model, plan.name)
        self.summary = Summary(batch_id, total=len(checked.lines))
        if checked.refused:
            return self._refused(checked)
        log = LocalLineLog(batch_id, plan.output, plan.errors)
        for known in log.open():
            self._add_known(known)
        self._tell()
        try:
            await self._send(
                checked,
                log,
                checker.endpoint,
                asking_for(app, self._bus, self._publisher, self._clock, model, [], self._bus.settings.name or BATCHES),
            )
        finally:
            log.close()
        log.finish()
        self._tell()
        return self.summary

    async def _send(self, checked: Checked, log: LocalLineLog, endpoint: str, ask_for: Any) -> None:
        now_ns = self._clock.now_ns()
        record = BatchRecord(
            batch_id=self.summary.batch_id,
            endpoint=endpoint,
            input_file_id=self._plan.input.name,
            completion_window=self._plan.window,
            created_ns=now_ns,
            expires_ns=now_ns + window_s(self._plan.window) * 1_000_000_000,
        )
        source = LineFile(self._plan.input)
        try:
            async with ask_for(record, source) as asking:
                await run_lines(checked.lines, log, asking, Window(self._plan.lines_at_once), self._on_result)
        finally:
            source.close()

    def _refused(self, checked: Checked) -> Summary:
        self.summary.status, self.summary.errors = "failed", checked.all_errors()
        return self.summary

    def _add_known(self, known: Known) -> None:
        self.summary.resumed += 1
        if known.succeeded:
            self._tally.completed += 1
        else:
            self._tally.failed_lines.add(known.line)

    def _on_result(self, result: LineResult) -> None:
        self._tally.add(result)
        self._tell()

    def _tell(self) -> None:
        """Tokens are those of this run; lines are those of all runs."""
        summary, tally = self.summary, self._tally
        summary.completed, summary.failed = tally.completed, tally.failed
        summary.prompt_tokens, summary.cached_tokens, summary.output_tokens = tally.prompt_tokens, tally.cached_tokens, tally.output_tokens
        summary.seconds = round(time.perf_counter() - self._started_s, 3)
        self._progress(summary)


def batch_id_of(path: Path, model: str, name: str) -> str:
    """The same for the same input and model: so a run that was killed finds its own requests."""
    digest = hashlib.sha256(f"{len(model)}:{model}{len(name)}:{name}".encode())
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return f"batch_{digest.hexdigest()[:32]}"


def print_errors(summary: Summary, path: Path) -> None:
    for error in summary.errors:
        where = f"{path}:{error.line}" if error.line is not None else str(path)
        print(f"{where}: {f'{error.param}: ' if error.param else ''}{error.message}", file=sys.stderr)
    print(f"jetwake: nothing was sent: {path} has lines that are refused", file=sys.stderr)


def print_summary(summary: Summary, plan: RunPlan) -> None:
    rate = summary.output_tokens / summary.seconds if summary.seconds else 0.0
    print(
        f"{summary.completed:,} of {summary.total:,} lines in {plan.output}, {summary.seconds:.1f} s, {rate:,.0f} output tokens/s",
        file=sys.stderr,
    )
    if summary.failed:
        print(f"{summary.failed:,} lines failed: see {plan.errors}", file=sys.stderr)
    if summary.status == "stopped":
        left = summary.total - summary.completed - summary.failed
        print(f"stopped with {left:,} lines to go: the same command goes on with them", file=sys.stderr)
