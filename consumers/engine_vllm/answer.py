"""One running leg: from vLLM's steps to the outputs of the engine contract, and the watch over a pull.

vLLM tells of a failed transfer only by a finish reason, and of a peer that froze not at all: here both become PullFailed.
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...schemas.errors import EngineDead, EngineRefused, PullFailed
from ...schemas.tokens import pack_tokens
from ..engine import EngineOutput, FinishReason, Leg
from .handoff import pull_params

if TYPE_CHECKING:
    from .runtime import Runtime, Step


@dataclass(frozen=True)
class Pulled:
    """What one leg got from its peer. Ranks pull side by side: the slowest counts."""

    size_bytes: int = 0
    transfer_s: float = 0.0
    at_monotonic_ns: int = 0


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
            pulled = asyncio.ensure_future(self._pulled())
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

    async def _pulled(self) -> Pulled:
        if self._leg.kv is None:
            return Pulled()
        ranks = await self._runtime.call("jw_pulled", self._leg.engine_request_id)
        now_ns = time.monotonic_ns()
        size_bytes = sum(rank[0] for rank in ranks)
        ago_s = min((rank[2] for rank in ranks if rank[0]), default=0.0)
        self._counters["pulls"] += 1
        self._counters["pulled_bytes"] += size_bytes
        return Pulled(size_bytes, max(rank[1] for rank in ranks), now_ns - int(ago_s * 1e9) if size_bytes else 0)

    async def _output(self, step: "Step", asked: "asyncio.Future[Pulled]") -> EngineOutput:
        reason = finish_reason(step)
        pulled = await asked if reason else Pulled()
        return EngineOutput(
            tokens=pack_tokens(step.tokens),
            logprobs=step.logprobs,
            finish_reason=reason,
            stop_reason=step.stop_reason,
            cached_tokens=step.cached_tokens if self._leg.kv is None else self._leg.kv.cached_tokens,
            kv_bytes=pulled.size_bytes,
            transfer_s=pulled.transfer_s,
            pulled_monotonic_ns=pulled.at_monotonic_ns,
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
