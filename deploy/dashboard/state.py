"""What is known of a pipeline at one moment, as the bus told it. Pure; `observer` fills it, `view` makes a picture of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...pipeline.topology import QueueCount, StreamCount
from ...schemas.streams import DEAD, OPENAI_JOBS, ROUTER_CONSUMERS
from ...schemas.subjects import handoff, last_token, prefill, requests
from ...schemas.workers import Role, WorkerCard, WorkerLoad
from .history import Gauges

NOTHING = QueueCount(0, 0)
ROLES: tuple[Role, ...] = ("prefill", "decode", "aggregated")


@dataclass(frozen=True)
class SeenRouter:
    name: str
    policy: str


@dataclass(frozen=True)
class Known:
    """`by_model`: requests by subject, asked for only where there are several models. `cards` by worker, `loads` by lane, `queues` by subject, `streams` by name; `now_ms` by the broker's clock."""

    now_ms: int
    connected: bool = True
    cards: Mapping[str, WorkerCard] = field(default_factory=dict[str, WorkerCard])
    loads: Mapping[str, WorkerLoad] = field(default_factory=dict[str, WorkerLoad])
    queues: Mapping[str, QueueCount] = field(default_factory=dict[str, QueueCount])
    streams: Mapping[str, StreamCount] = field(default_factory=dict[str, StreamCount])
    routers: tuple[SeenRouter, ...] = ()
    by_model: Mapping[str, int] = field(default_factory=dict[str, int])

    def workers(self, role: Role, pool: str = "") -> list[WorkerCard]:
        """By name; those of one pool, or all."""
        found = [card for card in self.cards.values() if card.role == role and (not pool or card.pool == pool)]
        return sorted(found, key=lambda card: natural(card.worker))

    @property
    def pools(self) -> list[str]:
        return sorted({card.pool for card in self.cards.values()})

    def load(self, card: WorkerCard) -> WorkerLoad:
        return self.loads.get(card.lane) or WorkerLoad(worker=card.worker, incarnation=card.incarnation, free_slots=card.capacity_slots)

    def requests(self) -> dict[str, QueueCount]:
        """By priority class."""
        return {last_token(spec.filter_subject): self.queues.get(spec.filter_subject, NOTHING) for spec in ROUTER_CONSUMERS}

    def requests_of(self, model: str) -> int:
        """All that have no worker yet, for this model."""
        if not self.several_models:
            return sum(count.pending + count.in_progress for count in self.requests().values())
        return sum(count for subject, count in self.by_model.items() if subject.startswith(requests(model, "")))

    @property
    def several_models(self) -> bool:
        return len({card.model for card in self.cards.values()}) > 1

    def jobs(self, card: WorkerCard) -> int:
        """Those that wait in this worker's own queue."""
        return self.queues.get(prefill(card.lane), NOTHING).pending

    def handoffs(self, pool: str) -> int:
        """Of all its domains."""
        return sum(count.pending for subject, count in self.queues.items() if subject.startswith(handoff(pool, "")))

    def stored(self, stream: str) -> int:
        count = self.streams.get(stream)
        return count.messages if count is not None else 0

    @property
    def dead_letters(self) -> int:
        return self.stored(DEAD.name)

    @property
    def durable_jobs(self) -> int:
        return self.stored(OPENAI_JOBS.name)

    def gauges(self) -> Gauges:
        cards = self.cards.values()
        return Gauges(
            waiting_requests=sum(count.pending + count.in_progress for count in self.requests().values()),
            waiting_jobs=sum(self.jobs(card) for card in cards),
            waiting_handoffs=sum(self.handoffs(pool) for pool in self.pools),
            running_prefill=sum(self.load(card).running_requests for card in cards if card.role != "decode"),
            running_decode=sum(self.load(card).running_requests for card in cards if card.role == "decode"),
        )


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Orders `prefill-2` before `prefill-10`."""
    parts: list[tuple[int, int, str]] = []
    text = ""
    for character in name + "\0":
        if text and character.isdigit() != text[-1].isdigit():
            parts.append((0, int(text), "") if text.isdecimal() else (1, 0, text))
            text = ""
        text += character
    return tuple(parts)
