"""One running leg: from vLLM's steps to the outputs of the engine contract, and the watch over a pull.

vLLM tells of a failed transfer only by a finish reason, and of a peer that froze not at all: here both become PullFailed.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING

from ...schemas.errors import EngineDead, EngineRefused, PullFailed
from ...schemas.tokens import pack_tokens
from ..engine import EngineOutput, FinishReason, Leg
from .handoff import pull_params

if TYPE_CHECKING:
    from .runtime import Runtime, Step


class Answer:
    def __init__(self, runtime: "Runtime", leg: Leg, pull_timeout_s: float, counters: dict[str, int]) -> None:
        self._runtime = runtime
        self._leg = leg
        self._pull_timeout_s = pull_timeout_s
        self._counters = counters

    async def outputs(self) -> AsyncGenerator[EngineOutput, None]:
        params = pull_params(self._leg.kv) if self._leg.kv else None
        async with aclosing(self._runtime.answer(self._leg, params)) as steps:
            first = await self._first_step(steps)
            # Asked for at once, so that the last output need not wait for it.
            pulled = asyncio.ensure_future(self._pulled_bytes())
            try:
                yield await self._output(first, pulled)
                async for step in steps:
                    yield await self._output(step, pulled)
            finally:
                pulled.cancel()

    async def _first_step(self, steps: "AsyncGenerator[Step, None]") -> "Step":
        """Raises PullFailed when the cache does not arrive in time; waiting for a slot or for memory does not count."""
        limit_s = None if self._leg.kv is None else self._pull_timeout_s
        asked = asyncio.ensure_future(anext(steps))
        try:
            while not (await asyncio.wait({asked}, timeout=limit_s))[0]:
                if await self._is_pulling():
                    raise self._pull_failure(f"no cache after {limit_s} s")
            step = await asked
        finally:
            if not asked.done():
                asked.cancel()
                await asyncio.wait({asked})
        if step.finish_reason == "error" and self._leg.kv is not None and not step.tokens:
            raise self._pull_failure("the transfer failed")
        return step

    async def _is_pulling(self) -> bool:
        """A worker that does not answer is taken to be stuck in the pull."""
        try:
            return any(await self._runtime.call("jw_pulling", self._leg.engine_request_id, timeout_s=self._pull_timeout_s))
        except EngineDead:
            if self._runtime.dead:
                raise
            return True

    def _pull_failure(self, text: str) -> PullFailed:
        self._counters["pull_failures"] += 1
        where = f"{self._leg.kv.host}:{self._leg.kv.port}" if self._leg.kv else "nowhere"
        return PullFailed(f"{self._leg.engine_request_id} from {where}: {text}")

    async def _pulled_bytes(self) -> int:
        if self._leg.kv is None:
            return 0
        count = sum(await self._runtime.call("jw_pulled_bytes", self._leg.engine_request_id))
        self._counters["pulls"] += 1
        self._counters["pulled_bytes"] += count
        return count

    async def _output(self, step: "Step", pulled: "asyncio.Future[int]") -> EngineOutput:
        reason = finish_reason(step)
        return EngineOutput(
            tokens=pack_tokens(step.tokens),
            logprobs=step.logprobs,
            finish_reason=reason,
            stop_reason=step.stop_reason,
            cached_tokens=step.cached_tokens if self._leg.kv is None else self._leg.kv.cached_tokens,
            kv_bytes=await pulled if reason else 0,
        )


async def only_step(steps: "AsyncGenerator[Step, None]") -> "Step":
    """Of a leg that ends with one token."""
    async with aclosing(steps):
        async for step in steps:
            return step
    raise EngineRefused("the engine gave no token")


def finish_reason(step: "Step") -> FinishReason | None:
    """Raises EngineRefused when vLLM ended the request for another reason than the model's."""
    if step.finish_reason is None or step.finish_reason == "stop" or step.finish_reason == "length":
        return step.finish_reason
    raise EngineRefused(f"the engine ended the request with {step.finish_reason!r}")
