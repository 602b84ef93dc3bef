"""The prefill worker's handed-off blocks: counted, their leases renewed while nobody has pulled them, freed when nobody will.

Reads the engine's own list of held blocks (the truth: what is not in it any more was pulled or freed) and
`jw.release.<worker>-<incarnation>`. A decode engine renews only what it already schedules, so a handoff that waits in the queue
lives by this loop alone.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from ..pipeline import instruments
from ..pipeline.clock import ServerClock
from ..pipeline.connection import Bus, RawMessage
from ..pipeline.endings import Endings
from ..pipeline.in_flight import InFlight
from ..schemas import signals, subjects
from ..schemas.codec import decode
from ..schemas.decode import KvHandoff
from ..schemas.errors import BusError, JetwakeError, RequestEnded, Undecodable
from ..schemas.prefill import ReleaseKv
from ..schemas.requests import InferenceRequest
from .engine import Engine

log = logging.getLogger(__name__)

POLL_S = 0.25
"""How often the engine is asked while anything is held: bounds how late cancels notice."""
FULL_POLL_S = 0.05
"""The same while so much is held that the worker takes nothing more: what was pulled meanwhile is room."""


class HeldHandoffs:
    """`full_blocks`: with so many held, the worker takes nothing more."""

    def __init__(self, engine: Engine, clock: ServerClock, in_flight: InFlight, endings: Endings, lease_s: float, full_blocks: int) -> None:
        self._engine = engine
        self._clock = clock
        self._in_flight = in_flight
        self._endings = endings
        self._lease_s = lease_s
        self._full_blocks = full_blocks
        self._held: dict[str, KvHandoff] = {}
        self._orders: deque[str] = deque()
        self._something = asyncio.Event()
        self._at_once = asyncio.Event()
        self.blocks = 0
        self.on_change: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        return len(self._held)

    async def listen(self, bus: Bus, lane: str) -> None:
        await bus.subscribe(subjects.release(lane), self._on_release)

    def add(self, handoff: KvHandoff) -> None:
        self._held[handoff.kv.engine_request_id] = handoff
        self.blocks += handoff.kv.held_blocks
        self._something.set()
        if self.blocks >= self._full_blocks:
            self._at_once.set()

    async def release(self, engine_request_id: str) -> None:
        """Free these blocks now. Unknown ids are ignored: they were pulled in the meantime."""
        await self._engine.release([engine_request_id])
        self._drop(engine_request_id)

    async def hand_back_all(self, error: JetwakeError) -> int:
        """Nobody pulled these: they are prefilled by others, and the handoffs that still wait for them are fenced. How many."""
        still_held = await self._engine.held()
        held = [handoff for name, handoff in self._held.items() if name in still_held]
        for handoff in held:
            await self._endings.again(handoff.request, error)
            await self.release(handoff.kv.engine_request_id)
        return len(held)

    async def run(self) -> None:
        """Renews, releases and counts until cancelled. Raises EngineDead.

        Ends are told beside that: while the broker is away it takes long, and the leases of other blocks would run out.
        """
        async with asyncio.TaskGroup() as telling:
            while True:
                await self._something.wait()
                self._at_once.clear()
                await self._one_round(telling)
                if not self._held and not self._orders:
                    self._something.clear()
                else:
                    await self._pause()

    async def _pause(self) -> None:
        """Until the next round is due, an order to release arrives, or so much is held that nothing more is taken."""
        with suppress(TimeoutError):
            async with asyncio.timeout(FULL_POLL_S if self.blocks >= self._full_blocks else POLL_S):
                await self._at_once.wait()

    async def _one_round(self, telling: asyncio.TaskGroup) -> None:
        while self._orders:
            await self.release(self._orders.popleft())
        still_held = await self._engine.held()
        now_ns = self._clock.now_ns()
        due: list[str] = []
        for engine_request_id, handoff in list(self._held.items()):
            held = still_held.get(engine_request_id)
            if held is None:
                self._drop(engine_request_id)
            elif ending := self._in_flight.expired(handoff.request, "while its handoff waited"):
                # Between the two legs nobody else may hold the request: free the blocks and end it here. The first terminal wins.
                await self.release(engine_request_id)
                telling.create_task(self._tell(handoff.request, ending))
            elif now_ns >= handoff.hold_until_ns:
                instruments.add(signals.LEASES_EXPIRED, 1)
                await self.release(engine_request_id)
            elif held.lease_remaining_s < self._lease_s * 2 / 3:
                due.append(engine_request_id)
        if due:
            await self._engine.extend(due, self._lease_s)

    async def _tell(self, request: InferenceRequest, ending: RequestEnded) -> None:
        try:
            await self._endings.ended_early(request, ending)
        except BusError as error:
            log.warning(
                "%s: %s, and whoever gets its handoff says so, because it cannot be told now: %s", request.request_id, ending, error
            )

    def _drop(self, engine_request_id: str) -> None:
        handoff = self._held.pop(engine_request_id, None)
        if handoff is not None:
            self.blocks -= handoff.kv.held_blocks
            self.on_change()

    def _on_release(self, message: RawMessage) -> None:
        try:
            order = decode(message.data, ReleaseKv)
        except Undecodable as error:
            log.warning("a release order that cannot be read: %s", error)
            return
        self._orders.append(order.engine_request_id)
        self._something.set()
        self._at_once.set()
