"""The engine contract kept by vLLM with its NIXL connector: prefill legs hold blocks for a peer, decode legs pull them.

`start()` spawns vLLM's processes and imports vLLM (this module does not). One engine is meant for one process; two in one process may
run together, but the second may start only once the first has spawned its processes, because both hand on the environment.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Any, Literal, cast

from ...schemas.errors import EngineDead, EngineRefused, PullFailed, SetupError
from ...schemas.tokens import pack_tokens, token_count
from ..engine import EngineInfo, EngineOutput, EngineStats, FinishReason, Held, Leg, Peer, Prefilled
from .facts import engine_info
from .handoff import ASK_FOR_HANDOFF, check, pull_params, reference_from
from .processes import ENGINE_VARIABLE, engine_processes, kill
from .settings import VllmSettings, environment, free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .runtime import Runtime, Step

HANDSHAKE_POLL_S = 0.01
DRAIN_POLL_S = 0.05
BOOKING_PAUSES_S = (0.0, 0.005, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
"""A finished prefill is in the worker's books only after the engine's next step: how long to ask again for it."""
FORGET_TRIES = 40


class VllmEngine:
    def __init__(self, settings: VllmSettings) -> None:
        self._settings = settings
        self._engine_id = str(uuid.uuid4())
        self._runtime: Runtime | None = None
        self._info: EngineInfo | None = None
        # Children die with the *thread* that spawned them (see plugin.py), so it is ours and lives as long as the engine.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vllm-engine")
        self._building: asyncio.Future[Runtime] | None = None
        self._legs = 0
        self._busy_since_s = 0.0
        self._held_blocks: dict[str, int] = {}
        self._cleanups: set[asyncio.Task[None]] = set()
        self._counters = dict.fromkeys(("prefills", "answers", "pulls", "pulled_bytes", "pull_failures", "aborts"), 0)

    # ------------------------------------------------------------------------------------------------------ life

    async def start(self) -> EngineInfo:
        port = self._settings.side_channel_port or free_port(self._settings.side_channel_host)
        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                self._building = asyncio.get_running_loop().run_in_executor(self._thread, self._build, port)
                self._runtime = await asyncio.shield(self._building)
                ranks = await self._call("jw_facts")
            self._info = engine_info(self._settings, self._runtime.config, ranks, port)
        except TimeoutError as error:
            await self.stop()
            raise SetupError(f"the engine did not start within {self._settings.start_timeout_s} s") from error
        except BaseException:
            await self.stop()
            raise
        return self._info

    def _build(self, port: int) -> "Runtime":
        import os

        os.environ.update(environment(self._settings, port) | {ENGINE_VARIABLE: self._engine_id})
        try:
            from .runtime import Runtime
        except ImportError as error:
            raise SetupError(f'vLLM cannot be imported ({error}): install "jetwake[cpu]" or "jetwake[gpu]"') from error
        return Runtime.build(self._settings, self._engine_id)

    async def stop(self) -> None:
        for cleanup in list(self._cleanups):
            cleanup.cancel()
        building, self._building, self._runtime = self._building, None, None
        if building is None:
            self._thread.shutdown(wait=False)
            return
        while not building.done():
            # A start that was given up: without its processes it fails soon.
            kill(engine_processes(self._engine_id))
            await asyncio.wait({building}, timeout=0.1)
        await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, self._end, building))
        self._thread.shutdown(wait=False)

    def _end(self, building: "asyncio.Future[Runtime]") -> None:
        processes = engine_processes(self._engine_id)
        if not building.cancelled() and building.exception() is None:
            building.result().shutdown(self._settings.stop_timeout_s)
        kill([*processes, *engine_processes(self._engine_id)])

    # ------------------------------------------------------------------------------------------------------ peers

    async def greet(self, peer: Peer) -> None:
        if peer.engine_id == self._started.engine_id:
            raise PullFailed("an engine does not pull from itself")
        deadline = time.monotonic() + self._settings.handshake_timeout_s
        arguments = (peer.engine_id, peer.host, peer.port, peer.tensor_parallel)
        states = set(await self._call("jw_handshake", *arguments))
        while states != {"done"}:
            if "failed" in states or time.monotonic() > deadline:
                raise PullFailed(f"no handshake with engine {peer.engine_id} at {peer.host}:{peer.port}")
            await asyncio.sleep(HANDSHAKE_POLL_S)
            states = set(await self._call("jw_handshake_state", peer.engine_id))

    async def forget(self, engine_id: str) -> None:
        for _ in range(FORGET_TRIES):
            if all(await self._call("jw_forget", engine_id)):
                return
            await asyncio.sleep(DRAIN_POLL_S)

    # ------------------------------------------------------------------------------------------------------ legs

    async def prefill(self, leg: Leg) -> Prefilled:
        runtime, info = self._live, self._started
        # One token is the whole answer: nothing to hand on, and stop strings count.
        alone = leg.sampling.max_tokens == 1
        steps = runtime.answer(leg, None) if alone else runtime.first_token(leg, dict(ASK_FOR_HANDOFF))
        with self._leg("prefills"):
            try:
                step = await self._only(steps)
            except asyncio.CancelledError:
                # It may have finished just now, and then its blocks wait for a peer that will never come.
                self._clean_up(self._release_leg(leg.engine_request_id))
                raise
        reason = _finish_reason(step)
        outcome = Prefilled(pack_tokens(step.tokens), None, step.cached_tokens, step.logprobs, reason, step.stop_reason)
        if step.kv_transfer_params is None:
            return outcome
        length = token_count(leg.prompt_tokens)
        kv = reference_from(step.kv_transfer_params, length, info.compatibility.block_size_tokens, step.cached_tokens)
        if reason == "stop":
            await self.release([kv.engine_request_id])
            return outcome
        self._held_blocks[kv.engine_request_id] = kv.held_blocks
        return Prefilled(outcome.first_tokens, kv, step.cached_tokens, step.logprobs)

    async def _only(self, steps: "AsyncGenerator[Step, None]") -> "Step":
        async with aclosing(steps):
            async for step in steps:
                return step
        raise EngineRefused("the engine gave no token")

    async def generate(self, leg: Leg) -> AsyncGenerator[EngineOutput, None]:
        runtime = self._live
        params = None
        if leg.kv is not None:
            check(leg, leg.kv, self._started)
            params = pull_params(leg.kv)
        with self._leg("answers"):
            async with aclosing(runtime.answer(leg, params)) as steps:
                first = await self._first_step(steps, leg)
                # Asked for at once, so that the last output need not wait for it.
                pulled = asyncio.ensure_future(self._pulled_bytes(leg))
                try:
                    yield await self._output(first, leg, pulled)
                    async for step in steps:
                        yield await self._output(step, leg, pulled)
                finally:
                    pulled.cancel()

    async def _first_step(self, steps: "AsyncGenerator[Step, None]", leg: Leg) -> "Step":
        """Raises PullFailed when the cache does not arrive in time; waiting for a slot or for memory does not count."""
        asked = asyncio.ensure_future(anext(steps))
        try:
            while not (await asyncio.wait({asked}, timeout=self._settings.pull_timeout_s if leg.kv else None))[0]:
                if await self._is_pulling(leg):
                    raise self._pull_failure(leg, f"no cache after {self._settings.pull_timeout_s} s")
            step = await asked
        finally:
            if not asked.done():
                asked.cancel()
                await asyncio.wait({asked})
        if step.finish_reason == "error" and leg.kv is not None and not step.tokens:
            raise self._pull_failure(leg, "the transfer failed")
        return step

    async def _is_pulling(self, leg: Leg) -> bool:
        """A worker that does not answer is taken to be stuck in the pull."""
        try:
            return any(await self._call("jw_pulling", leg.engine_request_id, timeout_s=self._settings.pull_timeout_s))
        except EngineDead:
            if self._live.dead:
                raise
            return True

    def _pull_failure(self, leg: Leg, text: str) -> PullFailed:
        self._counters["pull_failures"] += 1
        assert leg.kv is not None
        return PullFailed(f"{leg.engine_request_id} from {leg.kv.host}:{leg.kv.port}: {text}")

    async def _pulled_bytes(self, leg: Leg) -> int:
        if leg.kv is None:
            return 0
        count = sum(await self._call("jw_pulled_bytes", leg.engine_request_id))
        self._counters["pulls"] += 1
        self._counters["pulled_bytes"] += count
        return count

    async def _output(self, step: "Step", leg: Leg, pulled: "asyncio.Future[int]") -> EngineOutput:
        reason = _finish_reason(step)
        return EngineOutput(
            tokens=pack_tokens(step.tokens),
            logprobs=step.logprobs,
            finish_reason=reason,
            stop_reason=step.stop_reason,
            cached_tokens=step.cached_tokens if leg.kv is None else leg.kv.cached_tokens,
            kv_bytes=await pulled if reason else 0,
        )

    # ------------------------------------------------------------------------------------------------------ held blocks

    async def held(self) -> Mapping[str, Held]:
        if not self._held_blocks:
            return {}
        known = dict(self._held_blocks)
        answers = await self._call("jw_outstanding", list(known))
        held: dict[str, Held] = {}
        for name, blocks in known.items():
            leases = [answer[name] for answer in answers if name in answer]
            if leases:
                held[name] = Held(blocks, max(0.0, min(leases)))
            else:
                self._held_blocks.pop(name, None)
        return held

    async def extend(self, engine_request_ids: Sequence[str], lease_s: float) -> None:
        await self._until_booked("jw_extend", engine_request_ids, lease_s)

    async def release(self, engine_request_ids: Sequence[str]) -> None:
        await self._until_booked("jw_release", engine_request_ids)

    async def _until_booked(self, method: str, requests: Sequence[str], *arguments: object) -> None:
        pending = list(requests)
        for pause_s in BOOKING_PAUSES_S:
            if not pending:
                return
            await asyncio.sleep(pause_s)
            pending = sorted({name for answer in await self._call(method, pending, *arguments) for name in answer})

    async def _release_leg(self, leg: str) -> None:
        for pause_s in BOOKING_PAUSES_S:
            await asyncio.sleep(pause_s)
            names = {name for answer in await self._call("jw_names_of", leg) for name in answer}
            await self.release(sorted(names))

    # ------------------------------------------------------------------------------------------------------ state

    def stats(self) -> EngineStats:
        if self._runtime is None or self._info is None:
            return EngineStats(counters=dict(self._counters))
        load = self._runtime.load
        age_s = time.monotonic() - max(load.recorded_at_s, self._busy_since_s)
        return EngineStats(
            running_requests=load.running_requests,
            waiting_requests=load.waiting_requests,
            used_blocks=round(load.cache_usage * self._info.capacity_blocks),
            capacity_blocks=self._info.capacity_blocks,
            last_step_age_s=age_s if self._legs else 0.0,
            counters=self._counters | {"preemptions": load.preemptions},
        )

    async def ping(self, timeout_s: float) -> None:
        await self._call("jw_ping", timeout_s=timeout_s)

    async def drain(self) -> None:
        while self._legs or self._cleanups or await self.held():
            await asyncio.sleep(DRAIN_POLL_S)

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False when blocks are in use or held. For tests and benchmarks."""
        return await self._live.reset_prefix_cache()

    # ------------------------------------------------------------------------------------------------------ inside

    @property
    def _live(self) -> "Runtime":
        if self._runtime is None:
            raise EngineDead("the engine is not running")
        if self._runtime.dead:
            raise EngineDead("the engine's processes have ended")
        return self._runtime

    @property
    def _started(self) -> EngineInfo:
        if self._info is None:
            raise EngineDead("the engine is not running")
        return self._info

    async def _call(self, method: str, *arguments: object, timeout_s: float | None = None) -> list[Any]:
        return await self._live.call(method, *arguments, timeout_s=timeout_s)

    @contextmanager
    def _leg(self, counter: Literal["prefills", "answers"]) -> "Iterator[None]":
        if not self._legs:
            self._busy_since_s = time.monotonic()
        self._legs += 1
        self._counters[counter] += 1
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            self._counters["aborts"] += 1
            raise
        finally:
            self._legs -= 1

    def _clean_up(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._cleanups.add(task)
        task.add_done_callback(self._cleaned_up)

    def _cleaned_up(self, task: "asyncio.Task[None]") -> None:
        self._cleanups.discard(task)
        # An engine that died meanwhile holds nothing: its error is told to everyone else.
        if not task.cancelled():
            task.exception()


def _finish_reason(step: "Step") -> FinishReason | None:
    """Raises EngineRefused when vLLM ended the request for another reason than the model's."""
    if step.finish_reason in (None, "stop", "length"):
        return cast("FinishReason | None", step.finish_reason)
    raise EngineRefused(f"the engine ended the request with {step.finish_reason!r}")
