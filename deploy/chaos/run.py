"""One chaos run from start to ledger: a system, its load, faults, a phase without faults in which everything must end, the accounts.

Promises: nothing of the run is left on this machine but, when something was violated, a folder that says what: the ledger, every
reply of the requests concerned, and the logs of all processes.
"""

import asyncio
import json
import logging
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ...consumers.simulated_settings import SimulatedSettings
from ...pipeline.connection import Bus
from ...producers.client import Client
from ...schemas.errors import SetupError
from ...schemas.requests import Sampling
from ..options import parse_options
from .expected import measured_answers, simulated_answer
from .faults import Faults
from .ledger import Aftermath, Ledger, account
from .load import Draft, Load, LoadSettings, drafts, new_prompt
from .observer import Observer, Picture, differences
from .plan import Fault, plan
from .system import Shape, System, running, survivors
from .users import refusals

PROGRESS_EVERY_S = 5.0
LOOK_AGAIN_S = 1.0
REST_TIMEOUT_S = 150.0
"""A handoff whose release order was lost keeps its blocks for two minutes."""
POOL = 32
"""Prompts of a real model, whose answers are asked for beforehand."""
MEASURED_ANSWER_TOKENS = 32
GONE_WITHIN_S = 5.0


@dataclass(frozen=True)
class ChaosSettings:
    """`every_s`: about how far faults are apart. `settle_s`: within which everything accepted must have ended once they are over."""

    shape: Shape
    seed: int
    duration_s: float
    rate_per_s: float
    every_s: float
    kinds: Sequence[str]
    settle_s: float
    keep: Path


@dataclass(frozen=True)
class ChaosResult:
    """`kept`: the folder that says more, when something was violated."""

    seed: int
    engine: str
    seconds: float
    faults: dict[str, int]
    restarts: dict[str, int]
    ledger: Ledger
    kept: str

    @property
    def is_clean(self) -> bool:
        return self.ledger.is_clean and self.ledger.is_balanced

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ledger": self.ledger.as_dict(), "clean": self.is_clean}


async def run_chaos(settings: ChaosSettings, stopping: asyncio.Event, report: Callable[[str], None]) -> ChaosResult:
    """`stopping` ends load and faults early; the accounts are made all the same. Raises SetupError for what can serve nothing."""
    started_s, run_id = time.monotonic(), f"chaos-{settings.seed}-{random.SystemRandom().getrandbits(24):06x}"
    faults = plan(settings.seed, settings.duration_s, settings.every_s, settings.kinds, settings.shape.targets())
    with TemporaryDirectory(prefix="jetwake-chaos-") as name:
        folder = Path(name)
        run = _Run(settings, run_id, faults, stopping, report)
        with _logging_to(folder / "logs" / "clients.log"):
            async with running(settings.shape, folder, run_id, report) as system:
                await run.live(system)
                restarts = {name: child.restarts for name, child in system.children.items() if child.restarts}
                report("stopping")
        orphans = await _orphans(run_id)
        leftovers = [*run.aftermath.leftovers, *await asyncio.to_thread(refusals, folder / "logs")]
        aftermath = replace(run.aftermath, orphans=orphans, leftovers=leftovers)
        ledger = account(list(run.load.records.values()), run.ends, run.counts, aftermath)
        result = ChaosResult(
            seed=settings.seed,
            engine=settings.shape.engine,
            seconds=round(time.monotonic() - started_s, 1),
            faults=dict(Counter(run.faults_done)),
            restarts=restarts,
            ledger=ledger,
            kept="",
        )
        if not result.is_clean:
            result = replace(result, kept=str(settings.keep))
            await asyncio.to_thread(_keep, settings.keep, folder / "logs", result, run)
    return result


@contextmanager
def _logging_to(file: Path) -> Generator[None]:
    """The clients' log is kept beside those of the processes, and out of the sight of whoever watches the run."""
    file.parent.mkdir(parents=True, exist_ok=True)
    logger, handler = logging.getLogger(__name__.partition(".")[0]), logging.FileHandler(file)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    level, propagates = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagates
        handler.close()


async def _orphans(run_id: str) -> list[str]:
    """A process may take a moment to end after its parent did."""
    deadline_s = time.monotonic() + GONE_WITHIN_S
    while (alive := await asyncio.to_thread(survivors, run_id)) and time.monotonic() < deadline_s:
        await asyncio.sleep(0.1)
    return alive


class _Run:
    """What happens while the system lives. Its public fields are what the accounts are made of."""

    def __init__(
        self, settings: ChaosSettings, run_id: str, faults: Sequence[Fault], stopping: asyncio.Event, report: Callable[[str], None]
    ) -> None:
        self.settings = settings
        self.faults = faults
        self.ends: dict[str, Any] = {}
        self.counts: dict[str, int] = {}
        self.aftermath = Aftermath()
        self.faults_done: list[str] = []
        self.load = Load([], "", lambda _: [], run_id)
        self._run_id = run_id
        self._stopping = stopping
        self._report = report

    async def live(self, system: System) -> None:
        settings, counts_used_blocks = self.settings, self.settings.shape.engine == "simulated"
        async with AsyncExitStack() as stack:
            bus = await stack.enter_async_context(Bus.connect(system.broker, "chaos"))
            clients = [
                await stack.enter_async_context(Client.connect(system.client_broker(name), name=name))
                for name in settings.shape.targets().clients
            ]
            load_settings, expect = await self._load(system, clients[0])
            self.load = load = Load(clients, system.model, expect, self._run_id)
            observer = Observer(bus, load.records)
            await observer.start()
            before = await self._before(system, observer, counts_used_blocks)
            self._report(
                f"{len(before.workers or [])} workers at rest; {settings.duration_s:g} s of load, {len(self.faults)} faults, seed {settings.seed}"
            )
            await self._disturbed(load, load_settings, Faults(system, observer, self._say))
            self._report(f"no more faults: everything must end within {settings.settle_s:g} s")
            settled_s = time.monotonic() + settings.settle_s
            await load.wait_for_ends(settings.settle_s)
            self.ends, self.counts = await self._stored(observer, load, settled_s)
            after = await observer.picture_soon(counts_used_blocks, before, REST_TIMEOUT_S)
            self.aftermath = Aftermath(blocks_held=after.blocks_held, leftovers=differences(before, after))

    async def _before(self, system: System, observer: Observer, counts_used_blocks: bool) -> Picture:
        """With every worker there: a system that is not whole yet is nothing to compare with."""
        names = sorted(f"{name} ready" for name in self.settings.shape.targets().workers)
        deadline_s = time.monotonic() + 600
        while True:
            before = await observer.picture_soon(counts_used_blocks, None, 30.0)
            if before.workers == names and not (before.queued or before.blocks_held or before.running):
                return before
            if time.monotonic() > deadline_s:
                raise SetupError(f"the system did not come to rest before the run: {before}")

    async def _load(self, system: System, client: Client) -> tuple[LoadSettings, Callable[[Draft], list[int]]]:
        settings, shape = self.settings, self.settings.shape
        card = await client.model(system.model)
        longest_prompt = min(900, card.max_model_len_tokens // 2)
        if shape.engine == "simulated":
            options = parse_options(shape.engine_options, "--engine-option")
            known = {key: value for key, value in options.items() if key not in ("timing", "speed")}
            limits = SimulatedSettings(model=system.model, **known).limits()
            load = LoadSettings(settings.rate_per_s, card.vocabulary_size, longest_prompt, 160)
            return load, lambda draft: simulated_answer(limits, draft.prompt, Sampling(**draft.sampling))
        load = LoadSettings(settings.rate_per_s, card.vocabulary_size, min(300, longest_prompt), MEASURED_ANSWER_TOKENS, is_seeded=False)
        dice = random.Random(settings.seed)
        prefix = [dice.randrange(1, card.vocabulary_size) for _ in range(load.longest_prompt_tokens // 3)]
        prompts = [new_prompt(dice, load, prefix if number % 2 else []) for number in range(POOL)]
        self._report(f"asking for {len(prompts)} right answers")
        client.default_model = system.model
        answers = await measured_answers(client, prompts, MEASURED_ANSWER_TOKENS)
        self._report(f"{len(answers)} of {len(prompts)} answers are stable, {len({tuple(a) for a in answers.values()})} of them different")
        return replace(load, pool=list(answers)), lambda draft: answers[draft.prompt][: draft.sampling["max_tokens"]]

    async def _disturbed(self, load: Load, load_settings: LoadSettings, faults: Faults) -> None:
        settings = self.settings
        over = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            sending = tasks.create_task(load.send(drafts(load_settings, settings.seed, settings.shape.clients), over))
            showing = tasks.create_task(self._show(load))
            try:
                async with asyncio.timeout(settings.duration_s + 60):
                    await faults.run(self.faults, self._stopping)
                rest_s = settings.duration_s - load.after_s
                if rest_s > 0 and not self._stopping.is_set():
                    async with asyncio.timeout(rest_s):
                        await self._stopping.wait()
            except TimeoutError:
                pass  # the usual case: it lasted as long as it should
            over.set()
            await sending
            showing.cancel()
        self.faults_done = faults.done

    async def _stored(self, observer: Observer, load: Load, until_s: float) -> tuple[dict[str, Any], dict[str, int]]:
        """When all that was accepted has its end, or at the end of the time for that: who left does not wait for it."""
        records = list(load.records.values())
        while True:
            ends, counts = await observer.ends_of(records, load.model)
            missing = [record for record in records if record.submission == "accepted" and record.request_id not in ends]
            if not missing or time.monotonic() >= until_s:
                return ends, counts
            await asyncio.sleep(LOOK_AGAIN_S)

    async def _show(self, load: Load) -> None:
        while True:
            await asyncio.sleep(PROGRESS_EVERY_S)
            accepted, ended = load.counts()
            self._say(f"accepted {accepted}, ended {ended}, waiting {accepted - ended}")

    def _say(self, text: str) -> None:
        self._report(f"{self.load.after_s:6.1f} s  {text}")


def _keep(folder: Path, logs: Path, result: ChaosResult, run: _Run) -> None:
    """Everything that tells what went wrong. A folder that is there already gives way."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(logs, folder / "logs")
    (folder / "ledger.json").write_text(json.dumps(result.as_dict(), indent=1))
    (folder / "faults.txt").write_text("".join(f"{fault.at_s:7.2f} s  {fault}\n" for fault in run.faults))
    concerned = {violation.request_id for violation in result.ledger.violations}
    with (folder / "requests.jsonl").open("w") as lines:
        for request_id in sorted(concerned):
            end = run.ends.get(request_id)
            stored = None if end is None else {"type": end.type, "attempt": end.attempt, "tokens": len(end.tokens) // 4}
            line = {**asdict(run.load.records[request_id]), "stored": stored, "terminals": run.counts.get(request_id, 0)}
            lines.write(json.dumps(line) + "\n")


def print_chaos(result: ChaosResult, as_json: bool) -> None:
    if as_json:
        print(json.dumps(result.as_dict()))
        return
    ledger = result.ledger
    counted = ", ".join(f"{count} {name}" for name, count in sorted(result.faults.items())) or "none"
    print(f"seed {result.seed}, {result.engine} engines, {result.seconds:.0f} s; faults: {counted}")
    share = ledger.failed / ledger.accepted if ledger.accepted else 0.0
    by_code = ", ".join(f"{count} {code}" for code, count in ledger.failed_by_code.items())
    print(f"failed: {share:.2%} of the accepted{f' ({by_code})' if by_code else ''}; ended by attempt: {ledger.ended_by_attempt}")
    refused = ", ".join(f"{count} {code}" for code, count in ledger.refused_by_code.items())
    print(f"not accepted: {ledger.refused} refused{f' ({refused})' if refused else ''}, {ledger.unknown} with an unknown outcome")
    for violation in ledger.violations[:20]:
        print(f"violation: {violation.kind}: {violation.request_id}: {violation.text}")
    if len(ledger.violations) > 20:
        print(f"... and {len(ledger.violations) - 20} more")
    for leftover in ledger.leftovers:
        print(f"left over: {leftover}")
    if result.kept:
        print(f"details and logs: {result.kept}")
    print(ledger.line())
