"""An engine without a GPU and without a model, for everything else that has to be right: queues, leases, transfers, failures.

KV blocks are real bytes in real memory, moved by NIXL. A block is filled with the fingerprint of its token prefix, and decode
recomputes and compares every word of every block it pulled: a wrong, stale or missing pull is PullFailed, never a wrong answer.
Tokens are a function of the prefix (`simulated_model`), time is whatever the timing says (`timing`), blocks are kept as vLLM keeps
them (`block_pool`). A sequence that finds no room to grow gives up its blocks and computes them again when there is room.
"""

import asyncio
import importlib.metadata
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict, Field, SkipValidation

from ..schemas.blocks import block_count
from ..schemas.decode import KvReference
from ..schemas.errors import EngineDead, EngineRefused, PullFailed
from ..schemas.replies import PositionLogprobs
from ..schemas.tokens import pack_tokens, token_count
from ..schemas.workers import KvCompatibility, ModelCard
from .block_pool import BlockPool
from .engine import EngineInfo, EngineOutput, EngineStats, Held, Leg, Peer, Prefilled
from .kv_transfer_nixl import KvTransfer, Pull
from .simulated_cache import Leases, SequenceBlocks, SimulatedCache
from .simulated_model import Answer, Limits, begin, check_handoff
from .step_clock import StepClock
from .timing import ZERO, Timing

TOKENS_WITHOUT_TIME = 32
"""Tokens of one output when steps take no time, so that other requests get their turn."""
LOOK_AT_LEAST_EVERY_S = 0.01
LOOK_AT_MOST_EVERY_S = 0.001


class SimulatedSettings(BaseModel):
    """One simulated engine. Engines that exchange KV need equal model, block size and block bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    model: str = Field(default="simulated", min_length=1)
    tokenizer: str = Field(default="", description="folder or hub name of one, to see words; empty: clients see token numbers")
    served_name: str = Field(default="", description="what clients call it; empty: the name of the model")
    vocabulary_size: int = Field(default=32_000, ge=2)
    max_model_len_tokens: int = Field(default=32_768, ge=2)
    eos_token_id: int | None = Field(default=None, ge=0, description="the token that ends an answer; None: only max_tokens does")
    seed: int = Field(default=0, description="another seed is another model, wherever the temperature is above 0")
    block_size_tokens: int = Field(default=16, ge=1)
    num_blocks: int = Field(default=4096, ge=1)
    block_bytes: int = Field(default=512, ge=8, multiple_of=8)
    slots: int = Field(default=256, ge=1, description="requests that run at the same time; more wait")
    timing: SkipValidation[Timing] = ZERO
    lease_s: float = Field(default=30.0, gt=0.0, description="how long prefilled blocks wait for a peer unless extended")
    room_timeout_s: float = Field(default=60.0, gt=0.0, description="how long a request may wait for free blocks")
    pull_timeout_s: float = Field(default=20.0, gt=0.0)
    handshake_timeout_s: float = Field(default=5.0, gt=0.0)
    side_channel_host: str = "127.0.0.1"
    side_channel_port: int = Field(default=0, ge=0, le=65535, description="0: any free port")
    nixl_progress_delay_us: int = Field(default=100, ge=0, description="0 saves the last microseconds and burns a core for each engine")
    record_block_events: bool = Field(default=False, description="keep what was cached and evicted until it is taken")

    @property
    def name(self) -> str:
        return self.served_name or self.model


@dataclass
class _Run(SequenceBlocks):
    """One leg in hand, with its blocks."""

    leg: Leg = field(kw_only=True)
    answer: Answer = field(kw_only=True)
    pull: Pull | None = None
    kv_bytes: int = 0
    cached_tokens: int = 0
    steps: int = 0


class SimulatedEngine:
    """Keeps the contract in `engine`. Started once; after `stop` it stays dead."""

    def __init__(self, settings: SimulatedSettings) -> None:
        self._settings = settings
        self._limits = Limits(
            model=settings.name,
            vocabulary_size=settings.vocabulary_size,
            max_model_len_tokens=settings.max_model_len_tokens,
            block_size_tokens=settings.block_size_tokens,
            eos_token_id=settings.eos_token_id,
            seed=settings.seed,
        )
        self._engine_id = f"sim-{uuid.uuid4().hex[:16]}"
        self._transfer = KvTransfer(self._engine_id, settings.num_blocks, settings.block_bytes, settings.nixl_progress_delay_us)
        self.pool = BlockPool(settings.num_blocks, settings.block_size_tokens, settings.record_block_events)
        self._cache = SimulatedCache(self.pool, self._transfer.arena)
        self._clock = StepClock(settings.timing, self._cache.used_fraction)
        self._slots = asyncio.Semaphore(settings.slots)
        self._leases = Leases()
        self._look_after = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._waits: set[asyncio.Timeout] = set()
        self._running = self._waiting = self._port = 0
        self._counters = Counter[str]()
        self._is_stopped = False

    async def start(self) -> EngineInfo:
        settings = self._settings
        self._port = await self._transfer.start(settings.side_channel_host, settings.side_channel_port)
        # Not in a TaskGroup: the contract gives an engine's life two calls, which may come from different tasks.
        self._tasks = [asyncio.create_task(self._clock.run()), asyncio.create_task(self._look_after_blocks())]
        return EngineInfo(
            engine_id=self._engine_id,
            model=ModelCard(
                model=settings.name,
                source=settings.tokenizer,
                vocabulary_size=settings.vocabulary_size,
                max_model_len_tokens=settings.max_model_len_tokens,
                block_size_tokens=settings.block_size_tokens,
            ),
            compatibility=_compatibility(settings),
            capacity_blocks=settings.num_blocks,
            capacity_slots=settings.slots,
            kv_bytes_per_block=settings.block_bytes,
            side_channel_host=settings.side_channel_host,
            side_channel_port=self._port,
        )

    async def greet(self, peer: Peer) -> None:
        async with self._unless_stopped():
            await self._transfer.connect(peer.host, peer.port, peer.engine_id, self._settings.handshake_timeout_s)

    async def forget(self, engine_id: str) -> None:
        if not self._is_stopped:
            self._transfer.forget(engine_id)

    async def prefill(self, leg: Leg) -> Prefilled:
        async with self._in_hand(leg, token_count(leg.prompt_tokens)) as run:
            async with self._unless_stopped():
                await self._compute(run)
            token, _ = run.answer.draw()
            kv = None if run.answer.finish_reason else self._hold(run)
            self._counters["prefilled_requests"] += 1
            return Prefilled(
                first_tokens=pack_tokens([token]),
                kv=kv,
                cached_tokens=run.cached_tokens,
                logprobs=_logprobs(run, token),
                finish_reason=run.answer.finish_reason,
                stop_reason=run.answer.stop_reason,
            )

    async def generate(self, leg: Leg) -> AsyncGenerator[EngineOutput, None]:
        prompt_tokens = token_count(leg.prompt_tokens)
        remote_blocks = list[int]()
        if leg.kv is not None:
            self._check_alive()
            remote_blocks = check_handoff(leg.kv, prompt_tokens, self._settings.block_size_tokens, self._engine_id)
        async with self._in_hand(leg, prompt_tokens + leg.sampling.max_tokens - 1) as run:
            async with self._unless_stopped():
                if leg.kv is None:
                    await self._compute(run)
                else:
                    await self._pull(run, leg.kv, remote_blocks)
            while run.answer.finish_reason is None:
                async with self._unless_stopped():
                    output = await self._step(run)
                yield output

    async def held(self) -> Mapping[str, Held]:
        self._check_alive()
        self._free_what_was_pulled()
        now = _now()
        return {name: Held(len(lease.blocks), lease.expires_at - now) for name, lease in self._leases.items()}

    async def extend(self, engine_request_ids: Sequence[str], lease_s: float) -> None:
        self._check_alive()
        for name in engine_request_ids:
            self._leases.extend(name, _now() + lease_s)

    async def release(self, engine_request_ids: Sequence[str]) -> None:
        self._check_alive()
        for name in engine_request_ids:
            self._end_lease(name, "leases_released")

    def stats(self) -> EngineStats:
        return EngineStats(
            running_requests=self._running,
            waiting_requests=self._waiting,
            used_blocks=self.pool.used_blocks,
            capacity_blocks=self.pool.num_blocks,
            last_step_age_s=_now() - self._clock.last_step_at if self._running and self._clock.last_step_at else 0.0,
            counters=dict(self._counters),
        )

    async def ping(self, timeout_s: float) -> None:
        self._check_alive()

    async def drain(self) -> None:
        async with self._unless_stopped():
            while self._running or self._waiting or self.pool.used_blocks:
                await self._cache.changed.wait()

    async def stop(self) -> None:
        self._is_stopped = True
        for wait in self._waits:
            wait.reschedule(_now())
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._transfer.stop()

    # ---- one leg

    @asynccontextmanager
    async def _in_hand(self, leg: Leg, most_tokens: int) -> AsyncGenerator[_Run, None]:
        """A slot for the leg while the body runs; at the end its blocks go, once no transfer can write to them."""
        self._check_alive()
        answer = begin(leg, self._limits)
        run = _Run(answer.sequence, leg=leg, answer=answer)
        self._refuse_what_never_fits(min(most_tokens, self._settings.max_model_len_tokens))
        if leg.engine_request_id in self._leases:
            raise EngineRefused(f"{leg.engine_request_id} is the id of blocks that are still held")
        await self._take_slot()
        try:
            yield run
        finally:
            self._running -= 1
            self._slots.release()
            self._free(run)

    async def _take_slot(self) -> None:
        self._waiting += 1
        try:
            async with self._unless_stopped():
                await self._slots.acquire()
        finally:
            self._waiting -= 1
        self._running += 1

    async def _compute(self, run: _Run) -> None:
        """Fill the cache with the sequence so far, as a prefill step does."""
        await self._allocate(run)
        context = run.hits * self._settings.block_size_tokens
        await self._clock.prefill(run.sequence.num_tokens - context, context)
        self._cache.fill(run)
        if not run.steps:
            run.cached_tokens = context

    async def _pull(self, run: _Run, kv: KvReference, remote_blocks: list[int]) -> None:
        await self._transfer.connect(kv.host, kv.port, kv.engine_id, self._settings.handshake_timeout_s)
        await self._allocate(run)
        note = kv.engine_request_id.encode()
        run.pull = self._transfer.post(kv.engine_id, remote_blocks[run.hits :], run.blocks[run.hits :], note)
        run.kv_bytes = await run.pull.wait(self._settings.pull_timeout_s)
        run.cached_tokens = kv.cached_tokens
        self._verify(run)
        self._cache.commit(run)
        self._counters["pulled_requests"] += 1
        self._counters["pulled_bytes"] += run.kv_bytes

    def _verify(self, run: _Run) -> None:
        """All blocks of the prompt, those found in the own cache too. Raises PullFailed."""
        wrong = self._cache.wrong_blocks(run)
        self._counters["blocks_verified"] += len(run.blocks)
        self._counters["blocks_wrong"] += len(wrong)
        if wrong:
            origin = "cached here" if wrong[0] < run.hits else "pulled"
            raise PullFailed(f"block {wrong[0]} of {len(run.blocks)}, {origin}, does not hold this prompt ({len(wrong)} wrong in all)")

    async def _step(self, run: _Run) -> EngineOutput:
        """The first token after computing the prompt comes with that step; every other needs a decode step."""
        count = 1
        if run.steps or run.leg.kv is not None:
            await self._make_room(run)
            is_timed = await self._clock.decode()
            count = 1 if is_timed or not run.steps else TOKENS_WITHOUT_TIME
        run.steps += 1
        tokens, logprobs = self._draw(run, count)
        self._counters["drawn_tokens"] += len(tokens)
        return EngineOutput(
            tokens=pack_tokens(tokens),
            logprobs=logprobs,
            finish_reason=run.answer.finish_reason,
            stop_reason=run.answer.stop_reason,
            cached_tokens=run.cached_tokens,
            kv_bytes=run.kv_bytes,
        )

    def _draw(self, run: _Run, count: int) -> tuple[list[int], list[PositionLogprobs]]:
        """Up to `count` tokens: fewer at the end of the answer, or where the next one finds no room."""
        tokens, logprobs = list[int](), list[PositionLogprobs]()
        while True:
            token, has_filled_block = run.answer.draw()
            tokens.append(token)
            logprobs += _logprobs(run, token)
            if has_filled_block:
                self._cache.store_last(run)
            if run.answer.finish_reason or len(tokens) == count or not self._cache.has_room(run):
                return tokens, logprobs

    def _refuse_what_never_fits(self, most_tokens: int) -> None:
        needed = block_count(most_tokens, self._settings.block_size_tokens)
        if needed > self.pool.num_blocks:
            raise EngineRefused(f"the request may need {needed} KV blocks, the engine has {self.pool.num_blocks}")

    # ---- blocks

    async def _make_room(self, run: _Run) -> None:
        if not self._cache.has_room(run):
            self._counters["preemptions"] += 1
            self._free(run)
            await self._compute(run)

    async def _allocate(self, run: _Run) -> None:
        """One that has given tokens waits without limit: those before it in the queue end, and then it is its turn."""
        limit_s = self._settings.room_timeout_s
        try:
            await self._cache.allocate(run, None if run.steps else limit_s)
        except TimeoutError as error:
            text = f"no room for {run.sequence.num_tokens} tokens within {limit_s} s: {self.pool.free_blocks} KV blocks are free"
            raise (EngineRefused(text) if run.leg.kv is None else PullFailed(text)) from error

    def _free(self, run: _Run) -> None:
        blocks, run.blocks = run.blocks, []
        if run.pull is None:
            self._cache.release(blocks)
            return
        run.pull.when_settled(lambda: self._cache.release(blocks))
        if not run.pull.settled:
            self._look_after.set()

    # ---- blocks that wait for a peer

    def _hold(self, run: _Run) -> KvReference:
        name, blocks, run.blocks = run.leg.engine_request_id, run.blocks, []
        self._leases.add(name, blocks, _now() + self._settings.lease_s)
        self._look_after.set()
        return KvReference(
            engine_id=self._engine_id,
            engine_request_id=name,
            host=self._settings.side_channel_host,
            port=self._port,
            block_ids=[list(blocks)],
            block_size_tokens=self._settings.block_size_tokens,
            num_tokens=token_count(run.leg.prompt_tokens),
            cached_tokens=run.cached_tokens,
        )

    async def _look_after_blocks(self) -> None:
        """While blocks wait for a peer or for a transfer to settle: look often when something happens, else now and then."""
        pause_s = LOOK_AT_MOST_EVERY_S
        while True:
            if not self._leases and not self._transfer.poll_unsettled():
                self._look_after.clear()
                await self._look_after.wait()
            is_busy = self._free_what_was_pulled()
            pause_s = LOOK_AT_MOST_EVERY_S if is_busy else min(pause_s * 2, LOOK_AT_LEAST_EVERY_S)
            await asyncio.sleep(pause_s)

    def _free_what_was_pulled(self) -> bool:
        """And what nobody pulled in time. Whether there was any."""
        before = len(self._leases)
        for note in self._transfer.poll_notifications():
            self._end_lease(note.decode(errors="replace"), "leases_pulled")
        for name in self._leases.expired(_now()):
            self._end_lease(name, "leases_expired")
        return len(self._leases) != before

    def _end_lease(self, name: str, counter: str) -> None:
        blocks = self._leases.end(name)
        if blocks is not None:
            self._counters[counter] += 1
            self._cache.release(blocks)

    # ---- life

    def _check_alive(self) -> None:
        if self._is_stopped or not self._tasks or any(task.done() for task in self._tasks):
            raise EngineDead("the simulated engine is not running")

    @asynccontextmanager
    async def _unless_stopped(self) -> AsyncGenerator[None, None]:
        """Whatever is awaited in the body ends with EngineDead when the engine stops."""
        self._check_alive()
        try:
            async with asyncio.timeout(None) as wait:
                self._waits.add(wait)
                try:
                    yield
                finally:
                    self._waits.discard(wait)
        except TimeoutError as error:
            if not self._is_stopped:
                raise
            raise EngineDead("the simulated engine was stopped") from error


def _logprobs(run: _Run, token: int) -> list[PositionLogprobs]:
    return [] if run.leg.sampling.logprobs is None else [run.answer.logprobs(token)]


def _now() -> float:
    return asyncio.get_running_loop().time()


def _compatibility(settings: SimulatedSettings) -> KvCompatibility:
    return KvCompatibility(
        engine="simulated",
        engine_version=importlib.metadata.version("jetwake"),
        nixl_version=importlib.metadata.version("nixl"),
        model=settings.name,
        revision="",
        dtype="fingerprint",
        kv_dtype="uint64",
        block_size_tokens=settings.block_size_tokens,
        tensor_parallel=1,
        kv_layout=f"{settings.block_bytes} bytes",
    )
