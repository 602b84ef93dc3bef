"""An engine without a GPU and without a model, for everything else that has to be right: queues, leases, transfers, failures.

KV blocks are real bytes in real memory, moved by NIXL. A block is filled with the fingerprint of its token prefix, and decode
recomputes and compares every word of every block it pulled: a wrong, stale or missing pull is PullFailed, never a wrong answer.
Tokens are a function of the prefix (`simulated_model`), time is whatever the timing says (`timing`), blocks are kept as vLLM keeps
them (`block_pool`). A sequence that finds no room to grow gives up its blocks and computes them again when there is room.
"""

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from ..schemas.blocks import block_count
from ..schemas.decode import KvReference
from ..schemas.errors import EngineDead, EngineRefused, PullFailed
from ..schemas.replies import PositionLogprobs
from ..schemas.tokens import pack_tokens, token_count, unpack_tokens
from .block_pool import BlockPool
from .engine import BlockChange, EngineInfo, EngineOutput, EngineStats, Held, Leg, Peer, Prefilled
from .kv_transfer_nixl import KvTransfer, Pull
from .simulated_cache import SequenceBlocks, SimulatedCache, block_changes
from .simulated_leases import LeaseBook
from .simulated_model import Answer, begin, check_handoff
from .simulated_settings import SimulatedSettings
from .step_clock import StepClock

__all__ = ["SimulatedEngine", "SimulatedSettings"]

TOKENS_WITHOUT_TIME = 32
"""Tokens of one output when steps take no time, so that other requests get their turn."""


@dataclass
class _Run(SequenceBlocks):
    """One leg in hand, with its blocks."""

    leg: Leg = field(kw_only=True)
    answer: Answer = field(kw_only=True)
    pull: Pull | None = None
    kv_bytes: int = 0
    transfer_s: float = 0.0
    pulled_ns: int = 0
    cached_tokens: int = 0
    steps: int = 0


class SimulatedEngine:
    """Keeps the contract in `engine`. Started once; after `stop` it stays dead."""

    def __init__(self, settings: SimulatedSettings) -> None:
        self._settings = settings
        self._limits = settings.limits()
        self._engine_id = f"sim-{uuid.uuid4().hex[:16]}"
        self._transfer = KvTransfer(self._engine_id, settings.num_blocks, settings.block_bytes, settings.nixl_progress_delay_us)
        self.pool = BlockPool(settings.num_blocks, settings.block_size_tokens, settings.record_block_events)
        self._cache = SimulatedCache(self.pool, self._transfer.arena)
        self._clock = StepClock(settings.timing, self._cache.used_fraction)
        self._slots = asyncio.Semaphore(settings.slots)
        self._prefill_turn = asyncio.Lock()
        self._counters = Counter[str]()
        self._leases = LeaseBook(self._transfer, self._cache, self._counters)
        self._tasks: list[asyncio.Task[None]] = []
        self._waits: set[asyncio.Timeout] = set()
        self._running = self._waiting = self._port = 0
        self._is_stopped = False

    async def start(self) -> EngineInfo:
        settings = self._settings
        self._port = await self._transfer.start(settings.side_channel_host, settings.side_channel_port)
        # Not in a TaskGroup: the contract gives an engine's life two calls, which may come from different tasks.
        self._tasks = [asyncio.create_task(self._clock.run()), asyncio.create_task(self._leases.run())]
        return EngineInfo(
            engine_id=self._engine_id,
            model=settings.model_card(),
            compatibility=settings.compatibility(),
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
        self._leases.settle()
        now = _now()
        return {name: Held(len(lease.blocks), lease.expires_at - now) for name, lease in self._leases.items()}

    async def extend(self, engine_request_ids: Sequence[str], lease_s: float) -> None:
        self._check_alive()
        for name in engine_request_ids:
            self._leases.extend(name, _now() + lease_s)

    async def release(self, engine_request_ids: Sequence[str]) -> None:
        self._check_alive()
        for name in engine_request_ids:
            self._leases.end(name, "leases_released")

    async def block_changes(self) -> Sequence[BlockChange]:
        async with self._unless_stopped():
            while not (changes := block_changes(self.pool)):
                await self._cache.changed.wait()
            return changes

    def stats(self) -> EngineStats:
        return EngineStats(
            running_requests=self._running,
            waiting_requests=self._waiting,
            used_blocks=self.pool.used_blocks,
            capacity_blocks=self.pool.num_blocks,
            last_step_age_s=_now() - self._clock.last_step_at if self._running else 0.0,
            counters=dict(self._counters),
        )

    async def ping(self, timeout_s: float) -> None:
        self._check_alive()
        if self._clock.frozen:
            async with self._unless_stopped():
                await asyncio.sleep(timeout_s)
            raise EngineDead(f"the simulated engine did not answer within {timeout_s:g} s")

    async def drain(self) -> None:
        async with self._unless_stopped():
            while self._running or self._waiting or len(self._leases) or self._transfer.poll_unsettled():
                await self._cache.changed.wait()

    async def stop(self) -> None:
        self.die()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._transfer.stop()

    # ---- what goes wrong with engines

    def die(self) -> None:
        """As if its processes had been killed: everything in hand and every later call raises EngineDead."""
        self._is_stopped = True
        for wait in self._waits:
            wait.reschedule(_now())

    def stall(self) -> None:
        """As if its processes had been stopped: no step ends, no ping is answered, nothing fails. Until `go_on`."""
        self._clock.freeze()

    def go_on(self) -> None:
        self._clock.thaw()

    def _suffer(self, leg: Leg) -> None:
        """What the settings say that a prompt with certain tokens does to this engine."""
        if self._settings.dies_on_token is not None and self._settings.dies_on_token in unpack_tokens(leg.prompt_tokens):
            self.die()
        if self._settings.stalls_on_token is not None and self._settings.stalls_on_token in unpack_tokens(leg.prompt_tokens):
            self.stall()

    # ---- one leg

    @asynccontextmanager
    async def _in_hand(self, leg: Leg, most_tokens: int) -> AsyncGenerator[_Run, None]:
        """A slot for the leg while the body runs; at the end its blocks go, once no transfer can write to them."""
        self._check_alive()
        answer = begin(leg, self._limits)
        self._suffer(leg)
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
            self._cache.changed.ring()

    async def _take_slot(self) -> None:
        if self._slots.locked():
            await self._wait_for_slot()
        else:
            await self._slots.acquire()  # at once
        if not self._running:
            self._clock.note_progress()  # an idle engine is not a stuck one
        self._running += 1

    async def _wait_for_slot(self) -> None:
        self._waiting += 1
        try:
            async with self._unless_stopped():
                await self._slots.acquire()
        finally:
            self._waiting -= 1

    async def _compute(self, run: _Run) -> None:
        """Fill the cache with the sequence so far, as a prefill step does.

        Looks into the cache when its turn comes, as vLLM does: one that waited behind another with its prefix finds that cached.
        """
        async with self._prefill_turn:
            await self._allocate(run)
            context = run.hits * self._settings.block_size_tokens
            await self._clock.prefill(run.sequence.num_tokens - context, context)
            self._cache.fill(run)
        if not run.steps:
            run.cached_tokens = context

    async def _pull(self, run: _Run, kv: KvReference, remote_blocks: list[int]) -> None:
        await self._transfer.connect(kv.host, kv.port, kv.engine_id, self._settings.handshake_timeout_s)
        if self._settings.pulls_fail:
            raise PullFailed("the transfers of this simulated engine do not work")
        await self._allocate(run)
        note = kv.engine_request_id.encode()
        run.pull = self._transfer.post(kv.engine_id, remote_blocks[run.hits :], run.blocks[run.hits :], note)
        posted_ns = time.monotonic_ns()
        run.kv_bytes = await run.pull.wait(self._settings.pull_timeout_s)
        run.pulled_ns = time.monotonic_ns()
        run.transfer_s = (run.pulled_ns - posted_ns) / 1e9
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
            due = await self._clock.decode(run.sequence.num_tokens)
            count = (due or TOKENS_WITHOUT_TIME) if run.steps else 1
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
            transfer_s=run.transfer_s,
            pulled_monotonic_ns=run.pulled_ns,
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
            self._leases.look()

    def _hold(self, run: _Run) -> KvReference:
        name, blocks, run.blocks = run.leg.engine_request_id, run.blocks, []
        self._leases.add(name, blocks, _now() + self._settings.lease_s)
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
