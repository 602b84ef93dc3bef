"""Which topology domains have decode workers with room: a prefill worker there hands off nearby. Pure.

Only a preference: a handoff that finds no room in its domain is taken by another (`consumers.handoff_queues`).
"""

from collections.abc import Mapping

from ..schemas.workers import WorkerCard, WorkerLoad

Domain = tuple[str, str]
"""Of a pool: `(pool, domain)`."""


def domains_with_room(cards: Mapping[str, WorkerCard], loads: Mapping[str, WorkerLoad]) -> frozenset[Domain]:
    """`loads` is by lane. A decode worker that has told nothing yet has room."""
    decoding = [card for card in cards.values() if card.role == "decode" and card.state == "ready"]
    if len({(card.pool, card.domain) for card in cards.values()}) == len({card.pool for card in cards.values()}):
        return frozenset()  # one domain: nobody is far, whoever has room
    return frozenset((card.pool, card.domain) for card in decoding if (load := loads.get(card.lane)) is None or load.room > 0)


def is_far(card: WorkerCard, with_room: frozenset[Domain]) -> bool:
    """Whether what this worker prefills would have to go to another domain, where there is room for it."""
    if card.role != "prefill" or (card.pool, card.domain) in with_room:
        return False
    return any(pool == card.pool for pool, _ in with_room)
