"""What a pool has to do and what it has to do it with: which of its legs is short of workers. Pure.

Queues are those of this moment; times are the means of what ended in the last minute.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ...schemas.workers import WorkerCard
from .history import Slot
from .state import Known

LATELY_S = 60
WAIT_S = 0.1
"""Waits below this are nothing to act on."""
WAIT_SHARE = 0.3
"""Work waits long when it waits longer than this share of what it waits for and the wait together."""
BUSY = 0.4
"""Workers in use less than this are not what work waits for."""
MANY = 3
ROOM = 0.9
"""A leg that uses more of its slots or KV blocks than this has no room."""


@dataclass(frozen=True)
class Leg:
    """The workers of one role that take work. `used`: the larger of the shares of slots and of KV blocks in use."""

    workers: int
    running: int
    slots: int
    used: float


@dataclass(frozen=True)
class PoolReading:
    """`waiting_first`: requests of its model, and jobs, that wait for a first token."""

    pool: str
    model: str
    first: Leg
    decode: Leg
    waiting_first: int
    waiting_decode: int

    def short(self, lately: Slot) -> list[Literal["prefill", "decode"]]:
        """The legs that have work waiting for them, and are busy."""
        late, names = self.late(lately), list[Literal["prefill", "decode"]]()
        prefilling = lately.requests / LATELY_S * (lately.stage_mean_s("prefill") or 0.0)
        if "prefill" in late and (prefilling >= BUSY * self.first.workers or self.waiting_first >= MANY * self.first.workers):
            names.append("prefill")
        if "decode" in late and (self.decode.used >= BUSY or self.waiting_decode >= MANY * self.decode.workers):
            names.append("decode")
        return names

    def late(self, lately: Slot) -> list[Literal["prefill", "decode"]]:
        """The legs that work waits for, busy or not."""
        wait_s, work_s = waited_s(lately), lately.stage_mean_s("prefill") or 0.0
        handoff_s = lately.stage_mean_s("handoff_wait") or 0.0
        gap_s = handoff_s + sum(lately.stage_mean_s(stage) or 0.0 for stage in ("transfer", "first_step"))
        names: list[Literal["prefill", "decode"]] = []
        if self.first.workers and is_long(wait_s, wait_s + work_s, self.waiting_first, lately):
            names.append("prefill")
        if self.decode.workers and is_long(handoff_s, gap_s, self.waiting_decode, lately):
            names.append("decode")
        return names


def waited_s(lately: Slot) -> float:
    """For a worker to begin with the prompt, the mean."""
    return sum(lately.stage_mean_s(stage) or 0.0 for stage in ("queue", "routing", "prefill_queue"))


def is_long(wait_s: float, whole_s: float, waiting: int, lately: Slot) -> bool:
    """Whether many wait, and long. When none has ended yet, by how many there are.

    How many wait now says little of work that comes in bursts: how many did on average follows from how many came, and how long each waited.
    """
    if whole_s == 0.0:
        return waiting >= 3
    on_average = lately.requests / LATELY_S * wait_s
    return wait_s >= WAIT_S and wait_s >= WAIT_SHARE * whole_s and max(waiting, on_average) >= 1.0


def read_pool(known: Known, pool: str) -> PoolReading:
    first = [*known.workers("prefill", pool), *known.workers("aggregated", pool)]
    model = next(card.model for card in known.cards.values() if card.pool == pool)
    return PoolReading(
        pool=pool,
        model=model,
        first=_leg(known, first),
        decode=_leg(known, known.workers("decode", pool)),
        waiting_first=sum(known.jobs(card) for card in first) + known.requests_of(model),
        waiting_decode=known.handoffs(pool),
    )


def _leg(known: Known, cards: Iterable[WorkerCard]) -> Leg:
    ready = [card for card in cards if card.state == "ready"]
    loads = [known.load(card) for card in ready]
    slots, blocks = sum(card.capacity_slots for card in ready), sum(card.capacity_blocks for card in ready)
    running, used_blocks = sum(load.running_requests for load in loads), sum(load.used_blocks + load.wanted_blocks for load in loads)
    return Leg(len(ready), running, slots, max(running / slots if slots else 0.0, used_blocks / blocks if blocks else 0.0))
