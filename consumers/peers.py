"""Handshakes before traffic: greets every compatible peer as its card appears, and forgets those whose card is gone.

Reads the registry; writes the `peers` field of this worker's own card, by which routers know which pairs can exchange KV without
a late handshake. Decode workers greet (they are the ones who pull); both sides forget.
"""

import asyncio
import logging
from collections.abc import Mapping

from ..pipeline.registry import CardKeeper, Registry
from ..schemas.errors import BrokerUnavailable, PullFailed
from ..schemas.workers import WorkerCard
from .engine import Engine, Peer

log = logging.getLogger(__name__)

GREET_AGAIN_S = 2.0
ALONE_AFTER_S = 10.0
"""Workers that start together find each other sooner."""
OTHER_END = {"prefill": "decode", "decode": "prefill"}


def peers_to_greet(own: WorkerCard, cards: Mapping[str, WorkerCard]) -> dict[str, WorkerCard]:
    """By lane: the workers whose KV this one may have to pull. Pure."""
    if own.role != "decode":
        return {}
    return {card.lane: card for card in cards.values() if card.role == "prefill" and card.pool == own.pool and card.engine_id}


def without_peers(cards: Mapping[str, WorkerCard]) -> dict[str, str]:
    """By name: the workers that can exchange KV with nobody and so serve no request, and why. Pure."""
    return {card.worker: why for card in cards.values() if (why := _why_alone(card, cards))}


def _why_alone(card: WorkerCard, cards: Mapping[str, WorkerCard]) -> str:
    other_role = OTHER_END.get(card.role)
    if other_role is None:
        return ""
    others = sorted((other for other in cards.values() if other.role == other_role), key=lambda other: other.worker)
    if any(other.lane in card.peers or card.lane in other.peers for other in others):
        return ""
    compatible = [other.worker for other in others if other.pool == card.pool]
    if compatible:
        return f"no handshake with {', '.join(compatible)} yet: is the side channel of the prefill worker reachable?"
    of_model = [other for other in others if other.model == card.model]
    if not of_model:
        return f"there is no {other_role} worker for {card.model}"
    return "; ".join(f"{other.worker} has {_difference(card, other)}" for other in of_model[:3])


def _difference(card: WorkerCard, other: WorkerCard) -> str:
    own, its = card.compatibility.model_dump(), other.compatibility.model_dump()
    return ", ".join(f"{name} {its[name]}, not {own[name]}" for name in own if own[name] != its[name]) or f"the pool {other.pool}"


class Peers:
    def __init__(self, engine: Engine, card: WorkerCard, keeper: CardKeeper, registry: Registry) -> None:
        self._engine = engine
        self.card = card
        self._keeper = keeper
        self._registry = registry
        self._known: dict[str, WorkerCard] = {}
        self._changed = asyncio.Event()
        self._alone_since_s: float | None = None
        self._said = ""
        registry.on_change(self._changed.set)

    async def run(self) -> None:
        """Follows the registry until cancelled. Raises EngineDead."""
        while True:
            self._changed.clear()
            everyone_greeted = False
            try:
                everyone_greeted = await self.meet()
            except BrokerUnavailable as error:  # the card is renewed all the same, and then says it
                log.warning("whom %s can exchange KV with is told later: %s", self.card.worker, error)
            self._say_if_alone()
            try:
                async with asyncio.timeout(None if everyone_greeted and self._alone_since_s is None else GREET_AGAIN_S):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def _say_if_alone(self) -> None:
        """A warning for each reason, when it has lasted."""
        why = _why_alone(self.card, self._registry.workers)
        now_s = asyncio.get_running_loop().time()
        if not why:
            self._alone_since_s, self._said = None, ""
        elif self._alone_since_s is None:
            self._alone_since_s = now_s
        elif why != self._said and now_s - self._alone_since_s >= ALONE_AFTER_S:
            self._said = why
            log.warning("%s gets no work, for want of a peer to exchange KV with: %s", self.card.worker, why)

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
