"""Handshakes before traffic: greets every compatible peer as its card appears, and forgets those whose card is gone.

Reads the registry; writes the `peers` field of this worker's own card, by which routers know which pairs can exchange KV without
a late handshake. Decode workers greet (they are the ones who pull); both sides forget.
"""

import asyncio
import logging
from collections.abc import Mapping

from ..pipeline.registry import CardKeeper, Registry
from ..schemas.errors import PullFailed
from ..schemas.workers import WorkerCard
from .engine import Engine, Peer

log = logging.getLogger(__name__)

GREET_AGAIN_S = 2.0


def peers_to_greet(own: WorkerCard, cards: Mapping[str, WorkerCard]) -> dict[str, WorkerCard]:
    """By lane: the workers whose KV this one may have to pull. Pure."""
    if own.role != "decode":
        return {}
    return {card.lane: card for card in cards.values() if card.role == "prefill" and card.pool == own.pool and card.engine_id}


class Peers:
    def __init__(self, engine: Engine, card: WorkerCard, keeper: CardKeeper, registry: Registry) -> None:
        self._engine = engine
        self.card = card
        self._keeper = keeper
        self._registry = registry
        self._known: dict[str, WorkerCard] = {}
        self._changed = asyncio.Event()
        registry.on_change(self._changed.set)

    async def run(self) -> None:
        """Follows the registry until cancelled. Raises EngineDead."""
        while True:
            self._changed.clear()
            everyone_greeted = await self.meet()
            try:
                async with asyncio.timeout(None if everyone_greeted else GREET_AGAIN_S):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def meet(self) -> bool:
        """Greets who is new, forgets who is gone, says so on the card. Whether everyone answered."""
        wanted = peers_to_greet(self.card, self._registry.workers)
        before = set(self._known)
        for lane in before - set(wanted):
            await self._engine.forget(self._known.pop(lane).engine_id)
        for lane in set(wanted) - before:
            if await self._greet(wanted[lane]):
                self._known[lane] = wanted[lane]
        if set(self._known) != before:
            await self.update_card({"peers": sorted(self._known)})
        return set(self._known) == set(wanted)

    async def update_card(self, changes: Mapping[str, object]) -> None:
        """Changes fields of this worker's card; says it to others once the card has been announced."""
        self.card = self.card.model_copy(update=changes)
        await self._keeper.update(self.card)

    async def _greet(self, card: WorkerCard) -> bool:
        peer = Peer(card.engine_id, card.side_channel_host, card.side_channel_port, card.compatibility.tensor_parallel)
        try:
            await self._engine.greet(peer)
        except PullFailed as error:
            log.warning("no handshake with %s yet: %s", card.lane, error)
            return False
        return True
