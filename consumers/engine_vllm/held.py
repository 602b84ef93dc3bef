"""The blocks a prefill engine keeps for peers: which, how many, until when.

The leases are in the worker processes (see `lease_keeper.py`); here is only how many blocks each holds. A finished prefill reaches
the worker's books with the engine's next step, so what is just finished is asked for again.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from ..engine import Held

PAUSES_S = (0.0, 0.005, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
"""Between questions about a prefill that is not booked yet: more than one slow step in all."""

Call = Callable[..., Awaitable[list[Any]]]


class HeldBlocks:
    def __init__(self, call: Call) -> None:
        self._call = call
        self._blocks: dict[str, int] = {}

    def add(self, name: str, blocks: int) -> None:
        self._blocks[name] = blocks

    async def now(self) -> Mapping[str, Held]:
        if not self._blocks:
            return {}
        asked = dict(self._blocks)
        answers = await self._call("jw_outstanding", list(asked))
        held: dict[str, Held] = {}
        for name, blocks in asked.items():
            leases = [answer[name] for answer in answers if name in answer]
            if leases:
                held[name] = Held(blocks, max(0.0, min(leases)))
            else:
                self._blocks.pop(name, None)
        return held

    async def extend(self, names: Sequence[str], lease_s: float) -> None:
        await self._until_booked("jw_extend", names, lease_s)

    async def release(self, names: Sequence[str]) -> None:
        await self._until_booked("jw_release", names)

    async def release_leg(self, leg: str) -> None:
        """For a leg whose outcome nobody saw: it may have finished just before it was cancelled. Each question waits for a step."""
        for pause_s in PAUSES_S[:4]:
            await asyncio.sleep(pause_s)
            names = {name for answer in await self._call("jw_names_of", leg) for name in answer}
            if names:
                await self.release(sorted(names))

    async def _until_booked(self, method: str, names: Sequence[str], *arguments: object) -> None:
        pending = list(names)
        for pause_s in PAUSES_S:
            if not pending:
                return
            await asyncio.sleep(pause_s)
            pending = sorted({name for answer in await self._call(method, pending, *arguments) for name in answer})
