"""A worker's promise book: it runs only requests whose whole KV cache fits, so that no two wait for each other's blocks."""

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from ..schemas.blocks import block_count
from ..schemas.errors import EngineRefused, NoRoom
from ..schemas.requests import InferenceRequest


class BlockLedger:
    """Blocks promised to the requests in hand, so that only what fits is claimed. `need` of a request: prompt plus max_tokens.

    What the next handoff needs is known only once it is claimed; `claimable` assumes the largest recent one. One that does
    not fit after all waits here, and nothing more is claimed meanwhile: at most `wait_limit_s`, then another worker may have it.
    """

    def __init__(self, capacity_blocks: int, wait_limit_s: float = math.inf) -> None:
        self._capacity_blocks = capacity_blocks
        self._wait_limit_s = wait_limit_s
        self._promised_blocks = self._wanted_blocks = 0
        self._waiting = 0
        self._recent_needs: deque[int] = deque([1], maxlen=64)
        self._freed = asyncio.Condition()

    @staticmethod
    def need_blocks(request: InferenceRequest, max_model_len_tokens: int, block_size_tokens: int) -> int:
        """Prompt and whole answer."""
        tokens = min(request.prompt_length_tokens + request.sampling.max_tokens, max_model_len_tokens)
        return block_count(tokens, block_size_tokens)

    def promised_blocks(self) -> int:
        """What the requests in hand need in all, those that wait here included."""
        return self._promised_blocks + self._wanted_blocks

    def next_blocks(self) -> int:
        """What the next handoff is expected to need: the largest recent one."""
        return max(self._recent_needs)

    def claimable(self) -> int:
        """Pure: how many more handoffs may be claimed now."""
        if self._waiting:
            return 0
        free_blocks = self._capacity_blocks - self._promised_blocks
        return free_blocks // self.next_blocks()

    @asynccontextmanager
    async def reserve(self, need_blocks: int) -> AsyncGenerator[None]:
        """Holds `need_blocks` blocks. Raises EngineRefused for what can never fit, NoRoom after `wait_limit_s`."""
        if need_blocks > self._capacity_blocks:
            raise EngineRefused(f"needs {need_blocks} KV blocks, this worker has {self._capacity_blocks}")
        self._recent_needs.append(need_blocks)
        async with self._freed:
            self._waiting += 1
            self._wanted_blocks += need_blocks
            try:
                async with asyncio.timeout(None if self._wait_limit_s == math.inf else self._wait_limit_s):
                    await self._freed.wait_for(lambda: self._promised_blocks + need_blocks <= self._capacity_blocks)
            except TimeoutError as error:
                raise NoRoom(f"no room for {need_blocks} KV blocks within {self._wait_limit_s:g} s") from error
            finally:
                self._waiting -= 1
                self._wanted_blocks -= need_blocks
            self._promised_blocks += need_blocks
        try:
            yield
        finally:
            self._promised_blocks -= need_blocks
            async with self._freed:
                self._freed.notify_all()
