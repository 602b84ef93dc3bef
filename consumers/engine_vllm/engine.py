"""The engine contract kept by vLLM with its NIXL connector: prefill legs hold blocks for a peer, decode legs pull them.

`start()` imports vLLM and spawns its processes (this module does neither). One engine is meant for one process; two in one process
may run together, but the second may start only when the first has spawned its processes, because both hand on the environment.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Coroutine, Generator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Any

from ...schemas.errors import EngineDead, PullFailed, SetupError
from ...schemas.requests import Sampling, StructuredOutput
from ...schemas.tokens import pack_tokens, token_count
from ..engine import BlockChange, EngineInfo, EngineOutput, EngineStats, Held, Leg, Peer, Prefilled
from .answer import Answer, finish_reason, only_step
from .block_feed import BlockFeed
from .facts import engine_info
from .handoff import ASK_FOR_HANDOFF, check, reference_from
from .held import HeldBlocks
from .processes import EngineProcesses
from .settings import VllmSettings, events_endpoint, reserved_side_channel

if TYPE_CHECKING:
    from .runtime import Runtime

POLL_S = 0.05
HANDSHAKE_POLL_S = 0.01
FORGET_TRIES = 40
COUNTERS: tuple[str, ...] = ("prefills", "answers", "pulls", "pulled_bytes", "pull_failures", "aborts")
WARM_UP_LEGS = (
    Sampling(max_tokens=2, temperature=0.0, ignore_eos=True, logprobs=1),
    Sampling(max_tokens=2, seed=1, top_p=0.9, top_k=40, min_p=0.01, min_tokens=1, repetition_penalty=1.1, frequency_penalty=0.1),
    Sampling(max_tokens=2, structured_output=StructuredOutput(kind="json_object")),
)
"""Each of these takes a path that is prepared at its first use, for up to some seconds."""


class VllmEngine:
    def __init__(self, settings: VllmSettings) -> None:
        self._settings = settings
        self._engine_id = str(uuid.uuid4())
        self.processes = EngineProcesses(settings, self._engine_id)
        self._blocks = BlockFeed(events_endpoint(self._engine_id), settings.name, settings.block_size)
        self._runtime: Runtime | None = None
        self._info: EngineInfo | None = None
        self._held = HeldBlocks(self._call)
        self._legs = 0
        self._busy_since_s = 0.0
        self._cleanups: set[asyncio.Task[None]] = set()
        self._counters: dict[str, int] = dict.fromkeys(COUNTERS, 0)

    # ------------------------------------------------------------------------------------------------------ life

    async def start(self) -> EngineInfo:
        side_channel = reserved_side_channel(self._settings)
        try:
            self._blocks.open()
            async with asyncio.timeout(self._settings.start_timeout_s):
                self._runtime = await self.processes.build(side_channel.port)
                ranks = await self._call("jw_facts")
                self.processes.add([pid for rank in ranks for pid in rank["pids"]])
                self._info = engine_info(self._settings, self._runtime.config, ranks, side_channel.port)
                await self._warm_up()
        except TimeoutError as error:
            await self.stop()
            raise SetupError(f"the engine did not start within {self._settings.start_timeout_s} s") from error
        except BaseException:
            await self.stop()
            raise
        finally:
            side_channel.free()
        return self._info

    async def _warm_up(self) -> None:
        """The first step, and the first use of some options, take long; no request should pay for it."""
        for number, sampling in enumerate(WARM_UP_LEGS):
            leg = Leg(f"warm-up-{number}", pack_tokens([number + 1] * min(8, self._settings.max_model_len - 2)), sampling)
            async with aclosing(self._live.answer(leg, None)) as steps:
                async for _ in steps:
                    pass
        await self.reset_prefix_cache()

    async def stop(self) -> None:
        for cleanup in list(self._cleanups):
            cleanup.cancel()
        if self._runtime is not None:
            self._runtime.fail_legs()
        self._runtime = None
        await self.processes.end()
        self._blocks.close()

    # ------------------------------------------------------------------------------------------------------ peers

    async def greet(self, peer: Peer) -> None:
        if peer.engine_id == self._started.engine_id:
            raise PullFailed("an engine does not pull from itself")
        deadline = time.monotonic() + self._settings.handshake_timeout_s
        states = set(await self._call("jw_handshake", peer.engine_id, peer.host, peer.port, peer.tensor_parallel))
        while states != {"done"}:
            if "failed" in states or time.monotonic() > deadline:
                raise PullFailed(f"no handshake with engine {peer.engine_id} at {peer.host}:{peer.port}")
            await asyncio.sleep(HANDSHAKE_POLL_S)
            states = set(await self._call("jw_handshake_state", peer.engine_id))

    async def forget(self, engine_id: str) -> None:
        for _ in range(FORGET_TRIES):
            if all(await self._call("jw_forget", engine_id)):
                return
            await asyncio.sleep(POLL_S)

    # ------------------------------------------------------------------------------------------------------ legs

    async def prefill(self, leg: Leg) -> Prefilled:
        runtime, info = self._live, self._started
        # One token is the whole answer: nothing to hand on, and stop strings count.
        alone = leg.sampling.max_tokens == 1
        with self._leg("prefills"):
            try:
                step = await only_step(runtime.answer(leg, None) if alone else runtime.first_token(leg, dict(ASK_FOR_HANDOFF)))
            except asyncio.CancelledError:
                self._clean_up(self._held.release_leg(leg.engine_request_id))
                raise
        reason = finish_reason(step)
        first_tokens = pack_tokens(step.tokens)
        if step.kv_transfer_params is None:
            return Prefilled(first_tokens, None, step.cached_tokens, step.logprobs, reason, step.stop_reason)
        length = token_count(leg.prompt_tokens)
        kv = reference_from(step.kv_transfer_params, length, info.compatibility.block_size_tokens, step.cached_tokens)
        if reason == "stop":
            await self.release([kv.engine_request_id])
            return Prefilled(first_tokens, None, step.cached_tokens, step.logprobs, reason, step.stop_reason)
        self._held.add(kv.engine_request_id, kv.held_blocks)
        return Prefilled(first_tokens, kv, step.cached_tokens, step.logprobs)

    async def generate(self, leg: Leg) -> AsyncGenerator[EngineOutput, None]:
        runtime = self._live
        if leg.kv is not None:
            check(leg, leg.kv, self._started)
        with self._leg("answers"):
            answer = Answer(runtime, leg, self._settings.pull_timeout_s, self._counters)
            async with aclosing(answer.outputs()) as outputs:
                async for output in outputs:
                    yield output

    # ------------------------------------------------------------------------------------------------------ held blocks

    async def held(self) -> Mapping[str, Held]:
        _ = self._live
        return await self._held.now()

    async def extend(self, engine_request_ids: Sequence[str], lease_s: float) -> None:
        await self._held.extend(engine_request_ids, lease_s)

    async def release(self, engine_request_ids: Sequence[str]) -> None:
        await self._held.release(engine_request_ids)

    # ------------------------------------------------------------------------------------------------------ state

    async def block_changes(self) -> Sequence[BlockChange]:
        _ = self._live
        return await self._blocks.changes()

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
        while self._legs or self._cleanups or await self._held.now():
            await asyncio.sleep(POLL_S)

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
    def _leg(self, counter: str) -> Generator[None]:
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
