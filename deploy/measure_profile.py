"""`jetwake profile`: how long prefills and decode steps of a running system take, measured through the client, and a profile fitted to it.

Prefills: prompts that nothing holds, of several lengths, and continuations of one that is cached; one at a time, for one token. Decode: batches
of answers that start together; a step's time is read where all of a worker's answers are under way and no prompt is left to compute.
The system should have nothing else to do meanwhile. The way over the bus is part of a prefill, and so of the profile.
"""

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from ..pipeline.connection import Bus
from ..pipeline.registry import Registry
from ..pipeline.settings import BrokerSettings
from ..producers.client import Answer, Client
from ..schemas.errors import SetupError
from ..schemas.workers import ModelCard, WorkerCard
from .capacity.fit import DecodePoint, Fit, PrefillPoint, fit
from .capacity.profile_file import FittedProfile

LEAST_STEPS = 3
"""Fewer decode steps than this, with all answers under way, are no measurement."""
TRIES = 4
Report = Callable[[str], None]


@dataclass(frozen=True)
class ProfilePlan:
    """`lengths`: of uncached prompts; empty: some up to what the model takes. `batches`: answers at a time. `contexts`: lengths of their
    prompts; empty: a short and a long one. Every point is measured `repeats` times, and the median counts.
    """

    model: str | None = None
    lengths: Sequence[int] = ()
    batches: Sequence[int] = (1, 2, 4, 8)
    contexts: Sequence[int] = ()
    steps: int = 24
    repeats: int = 3
    seed: int = 0

    def prompts(self, card: ModelCard) -> list[int]:
        """Raises SetupError."""
        most = card.max_model_len_tokens - self.steps
        lengths = list(self.lengths) or [length for length in (64, 128, 256, 512, 1024, 2048, 4096) if length <= most]
        return _within(lengths, most, "prompt")

    def decode_prompts(self, card: ModelCard) -> list[int]:
        """Raises SetupError."""
        most = card.max_model_len_tokens - self.steps
        return _within(list(self.contexts) or sorted({min(32, most), min(1024, most)}), most, "context")


def _within(lengths: list[int], most: int, what: str) -> list[int]:
    if any(not 1 <= length <= most for length in lengths) or not lengths:
        raise SetupError(f"every {what} length must be from 1 to {most}, what the model leaves; not {', '.join(map(str, lengths))}")
    return sorted(lengths)


@dataclass
class Measured:
    prefills: list[PrefillPoint] = field(default_factory=list[PrefillPoint])
    decodes: list[DecodePoint] = field(default_factory=list[DecodePoint])
    kv_bytes_per_token: int = 0


@dataclass(frozen=True)
class Profiled:
    fitted: FittedProfile
    measured: Measured
    prefill: Fit
    decode: Fit


async def measure_profile(broker: BrokerSettings, plan: ProfilePlan, name: str, report: Report) -> Profiled:
    """Raises SetupError where too little could be measured."""
    async with Client.connect(broker) as client:
        card = await client.model(plan.model)
        run = _Run(client, card, plan, report)
        await run.ask(run.random_prompt(plan.prompts(card)[0]), 2)  # warms up
        await run.prefills()
        await run.decodes()
    prefill, decode = fit(run.measured.prefills), fit(run.measured.decodes)
    workers = await _workers(broker, card.model)
    fitted = FittedProfile(
        name=name,
        measured=f"{card.model} on {len(workers)} workers, {workers[0].compatibility.engine} {workers[0].compatibility.engine_version}",
        prefill_step_s=prefill.coefficients[0],
        prefill_token_s=prefill.coefficients[1],
        prefill_pair_s=prefill.coefficients[2],
        decode_step_base_s=decode.coefficients[0],
        decode_sequence_s=decode.coefficients[1],
        decode_context_token_s=decode.coefficients[2],
        kv_capacity_tokens=min(worker.capacity_blocks for worker in workers) * card.block_size_tokens,
        kv_bytes_per_token=run.measured.kv_bytes_per_token,
        prefill_quality=prefill.quality,
        decode_quality=decode.quality,
    )
    return Profiled(fitted, run.measured, prefill, decode)


async def _workers(broker: BrokerSettings, model: str) -> list[WorkerCard]:
    async with Bus.connect(broker, name="profile") as bus:
        registry = Registry(bus)
        await registry.start()
        return [card for card in registry.workers.values() if card.model == model]


class _Run:
    def __init__(self, client: Client, card: ModelCard, plan: ProfilePlan, report: Report) -> None:
        self.measured = Measured()
        self._client = client
        self._card = card
        self._plan = plan
        self._report = report
        self._random = random.Random(f"{plan.seed}/{time.time_ns()}")  # not the seed alone: what another run sent may still be cached

    def random_prompt(self, length: int) -> list[int]:
        return [self._random.randrange(self._card.vocabulary_size) for _ in range(length)]

    async def ask(self, prompt: list[int], max_tokens: int) -> Answer:
        return await self._client.generate(prompt, model=self._card.model, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)

    async def prefills(self) -> None:
        lengths = self._plan.prompts(self._card)
        for length in lengths:
            answers = [await self.ask(self.random_prompt(length), 1) for _ in range(self._plan.repeats)]
            self._note_prefill(length, answers)
        halves = [length // 2 for length in lengths if length // 2 >= 2 * self._card.block_size_tokens][-2:]
        for half in halves:
            answers = list[Answer]()
            for _ in range(self._plan.repeats):
                known = self.random_prompt(half)
                await self.ask(known, 1)
                answers.append(await self.ask(known + self.random_prompt(half), 1))
            self._note_prefill(2 * half, answers)

    def _note_prefill(self, length: int, answers: list[Answer]) -> None:
        """A continuation may have gone to a worker that does not know its beginning: what was cached is what the engine says."""
        by_cached = dict[int, list[float]]()
        for answer in answers:
            by_cached.setdefault(answer.cached_tokens, []).append(answer.ttft_ms / 1e3)
        for cached, seconds in by_cached.items():
            point = PrefillPoint(length - cached, cached, statistics.median(seconds))
            self.measured.prefills.append(point)
            self._report(f"prefill of {point.new_tokens} tokens after {cached} cached: {point.seconds * 1e3:.1f} ms")

    async def decodes(self) -> None:
        for length in self._plan.decode_prompts(self._card):
            for batch in self._plan.batches:
                points = list[DecodePoint]()
                for _ in range(self._plan.repeats):
                    points += await self._decode(batch, length)
                for size in sorted({point.batch for point in points}):
                    alike = [point for point in points if point.batch == size]
                    seconds = statistics.median(point.seconds for point in alike)
                    context = statistics.fmean(point.context_tokens for point in alike)
                    self.measured.decodes.append(DecodePoint(size, context, seconds))
                    self._report(f"decode step of {size} at {context:,.0f} tokens of context: {seconds * 1e3:.2f} ms")

    async def _decode(self, batch: int, length: int) -> list[DecodePoint]:
        """Prompts are prefilled before, so that the answers start together; where they still do not overlap, longer ones are tried."""
        steps = self._plan.steps
        for _ in range(TRIES):
            prompts = [self.random_prompt(length) for _ in range(batch)]
            for prompt in prompts:
                await self.ask(prompt, 1)
            async with asyncio.TaskGroup() as tasks:
                following = [tasks.create_task(self._follow(prompt, steps)) for prompt in prompts]
            by_worker = dict[str, list[AnswerStream]]()
            for stream in (task.result() for task in following):
                by_worker.setdefault(stream.worker, []).append(stream)
            points = [decode_point(group) for group in by_worker.values()]
            if all(points):
                return [point for point in points if point]
            steps = min(2 * steps, self._card.max_model_len_tokens - length)
        return []

    async def _follow(self, prompt: list[int], steps: int) -> "AnswerStream":
        stream = AnswerStream(len(prompt))
        submitted = await self._client.submit(prompt, model=self._card.model, max_tokens=steps, temperature=0.0, ignore_eos=True)
        async for piece in submitted:
            if piece.token_ids:
                stream.arrivals.append((time.perf_counter(), len(piece.token_ids)))
        answer = await submitted.answer()
        stream.worker = answer.decode_worker
        pulled_tokens = -(-len(prompt) // self._card.block_size_tokens) * self._card.block_size_tokens
        self.measured.kv_bytes_per_token = max(self.measured.kv_bytes_per_token, answer.kv_bytes // pulled_tokens)
        return stream


@dataclass
class AnswerStream:
    """One answer: when its tokens came, and how many."""

    prompt_tokens: int
    arrivals: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    worker: str = ""

    def tokens(self, after_s: float, until_s: float) -> int:
        return sum(count for at_s, count in self.arrivals if after_s < at_s <= until_s)


def decode_point(streams: Sequence[AnswerStream]) -> DecodePoint | None:
    """Of the answers of one worker: from when each has its second token (its prompt is done, its cache has arrived) until the first ends."""
    if any(len(stream.arrivals) < 2 for stream in streams):
        return None
    start_s = max(stream.arrivals[1][0] for stream in streams)
    end_s = min(stream.arrivals[-1][0] for stream in streams)
    steps = statistics.fmean(stream.tokens(start_s, end_s) for stream in streams)
    if steps < LEAST_STEPS:
        return None
    middle_s = (start_s + end_s) / 2
    context = sum(stream.prompt_tokens + stream.tokens(0.0, middle_s) for stream in streams)
    return DecodePoint(len(streams), context, (end_s - start_s) / steps)


def print_profiled(profiled: Profiled) -> None:
    console = Console()
    for title, points, found in (
        ("prefill", profiled.measured.prefills, profiled.prefill),
        ("decode step", profiled.measured.decodes, profiled.decode),
    ):
        table = Table(box=SIMPLE, title=title, title_justify="left")
        first = ("new tokens", "cached") if title == "prefill" else ("batch", "context")
        for heading in (*first, "measured", "fitted", "off by"):
            table.add_column(heading, justify="right")
        for point, predicted_s in zip(points, found.predicted_s, strict=True):
            one, other = (
                (point.new_tokens, point.context_tokens) if isinstance(point, PrefillPoint) else (point.batch, point.context_tokens)
            )
            off = predicted_s / point.seconds - 1
            table.add_row(f"{one}", f"{other:,.0f}", f"{point.seconds * 1e3:.2f} ms", f"{predicted_s * 1e3:.2f} ms", f"{off:+.0%}")
        console.print(table, highlight=False)
        console.print(
            f"  R2 {found.quality.r2:.3f}, mean error {found.quality.mape:.1%} over {found.quality.points} points", highlight=False
        )
    fitted = profiled.fitted
    console.print(
        f"prefill = {fitted.prefill_step_s * 1e3:.2f} ms + {fitted.prefill_token_s * 1e6:.2f} us a token "
        f"+ {fitted.prefill_pair_s * 1e9:.3f} ns a pair of tokens",
        highlight=False,
    )
    console.print(
        f"decode step = {fitted.decode_step_base_s * 1e3:.2f} ms + {fitted.decode_sequence_s * 1e3:.3f} ms a sequence "
        f"+ {fitted.decode_context_token_s * 1e6:.4f} us a token of context",
        highlight=False,
    )
    console.print(f"KV cache of a worker: {fitted.kv_capacity_tokens:,} tokens", highlight=False)
