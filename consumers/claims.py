"""Of all who ever get a handoff, one may pull its blocks or let go of them: the one whose claim is stored first.

Writes and reads `jw.claims.<request>.<attempt>`. Promises: a handoff is claimed once for as long as the broker remembers; whether it may
have forgotten can be asked (`would_be_known`), so that nobody takes a forgotten claim for none.
"""

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager

from ..pipeline.connection import Bus
from ..pipeline.jetstream import newest_message
from ..pipeline.publish import Publisher
from ..pipeline.topology import nothing_lost_since_ns
from ..schemas import subjects
from ..schemas.decode import KvHandoff
from ..schemas.errors import HandoffRefused, HandoffStale, SequenceConflict
from ..schemas.streams import CLAIMS
from ..schemas.workers import WorkerCard

CLOCKS_NS = 1_000_000_000
"""The servers of a cluster agree on the time to less than this."""


class Claims:
    """`lane`: in whose name; `alive` gives the live worker cards."""

    def __init__(self, bus: Bus, publisher: Publisher, lane: str, alive: Callable[[], Mapping[str, WorkerCard]]) -> None:
        self._bus = bus
        self._publisher = publisher
        self._lane = lane
        self._alive = alive
        self._in_hand: set[tuple[str, int]] = set()

    @asynccontextmanager
    async def claimed(self, handoff: KvHandoff) -> AsyncGenerator[None]:
        """Claims it for the length of the body, and for ever from anybody else.

        Raises HandoffStale when a live worker has it in hand, this one too; HandoffRefused when it was claimed before; BusError.
        """
        key = (handoff.request.request_id, handoff.request.attempt)
        if key in self._in_hand:
            raise HandoffStale("this handoff came again, and is in hand here")
        self._in_hand.add(key)
        try:
            await self._claim(handoff)
            yield
        finally:
            self._in_hand.discard(key)

    async def may_let_go(self, handoff: KvHandoff) -> bool:
        """Whether its blocks may be freed: nobody pulls them now, and whoever gets it later is told that it is claimed. Raises BusError."""
        if (handoff.request.request_id, handoff.request.attempt) in self._in_hand:
            return False
        try:
            await self._claim(handoff)
        except HandoffStale:
            return False  # whoever has it lets go of it
        except HandoffRefused:
            return True
        return True

    async def _claim(self, handoff: KvHandoff) -> None:
        request = handoff.request
        subject = subjects.claim(request.request_id, request.attempt)
        message_id = subjects.message_id(request.request_id, f"claim-{self._lane}", request.attempt)
        try:
            await self._publisher.store_bytes(subject, self._lane.encode(), message_id=message_id, first_only=True)
        except SequenceConflict as error:
            claimer = await self._claimer(subject)
            if claimer != self._lane and claimer in {card.lane for card in self._alive().values()}:
                raise HandoffStale(f"{claimer} has claimed this handoff") from error
            raise HandoffRefused(f"{claimer} claimed this handoff before: its blocks may be pulled or reused already") from error

    async def would_be_known(self, stored_ns: int) -> bool:
        """Whether a claim of a handoff that was stored then (broker's time) would be there still. Raises BusError."""
        apart_ns = CLOCKS_NS if self._bus.is_clustered else 0
        return await nothing_lost_since_ns(self._bus, CLAIMS.name) + apart_ns < stored_ns

    async def _claimer(self, subject: str) -> str:
        message = await newest_message(self._bus, CLAIMS.name, subject)
        return message.data.decode(errors="replace") if message is not None else "a worker"
