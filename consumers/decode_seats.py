"""How a decode worker asks for handoffs, so that the broker gives each to the worker that should have it. Pure; replays use it too.

The broker serves waiting pulls in the order of their priority, those of one priority in turn. A worker's free room is a row of seats:
each has the priority of the load that the worker will have when all seats before it are taken. So the least used worker is served
first, also in a burst, and no pull must be changed because a seat was taken: the next one is asked for already.

A handoff waits in the queue of its prefill worker's topology domain. Workers of that domain ask there for most of their seats, at
near priorities; others for few, at far ones, so that they are served only while no near worker has a seat.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

NEAR_BOUNDS = (0.02, 0.05, 0.1, 0.2, 0.4, 0.7)
"""Used shares at which the priority in the own domain becomes worse by one: 0 to 6."""
FAR_BOUNDS = (0.1, 0.4)
"""The same in other domains: 7 to 9, the last that the broker knows."""
NEAR_TURNS = 15
"""A single free seat is offered to the own domain in so many turns of sixteen: a near handoff hardly ever goes far for want of it."""
FAR_TURNS = 4
"""How many turns a seat stays with one other domain before it goes to the next, where there are more domains than seats."""


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """What a decode worker has in hand, and what it could have. `next_blocks`: what the next handoff is expected to need."""

    promised_blocks: int
    capacity_blocks: int
    running: int
    slots: int
    next_blocks: int = 1

    def share(self) -> float:
        """The part of it that is used: of its KV cache or of its slots, whichever is fuller."""
        return max(self.promised_blocks / max(1, self.capacity_blocks), self.running / max(1, self.slots))

    def near_priority(self) -> int:
        share = self.share()
        return sum(share >= bound for bound in NEAR_BOUNDS)

    def far_priority(self) -> int:
        share = self.share()
        return 1 + len(NEAR_BOUNDS) + sum(share >= bound for bound in FAR_BOUNDS)

    def taken_at(self, bound: float) -> int:
        """How many more can be taken until this share of it is used."""
        blocks = (bound * self.capacity_blocks - self.promised_blocks) / max(1, self.next_blocks)
        return max(0, math.ceil(min(blocks, bound * self.slots - self.running)))


def near_seats(load: DecodeLoad, arrived: int, count: int) -> dict[int, int]:
    """By priority, how many handoffs to ask the own domain for. `arrived`: handoffs that have come and are not in `load` yet."""
    seats, begin, end = dict[int, int](), arrived, arrived + count
    for priority, bound in enumerate((*NEAR_BOUNDS, math.inf)):
        until = end if bound == math.inf else min(end, load.taken_at(bound))
        if until > begin:
            seats[priority] = until - begin
            begin = until
    return seats


def far_seats(free: int, far_domains: int, turn: int) -> Mapping[int, int]:
    """By the place of another domain, how many of `free` seats it is offered: one each, as long as half stay with the own domain.

    Where that is not enough for all, they have it in turn.
    """
    if far_domains <= 0 or free <= 0:
        return {}
    if free == 1:
        rest, phase = divmod(turn, NEAR_TURNS + 1)
        return {rest % far_domains: 1} if phase == NEAR_TURNS else {}
    return {(turn // FAR_TURNS + place) % far_domains: 1 for place in range(min(far_domains, free // 2))}


def takes_turns(free: int, far_domains: int) -> bool:
    """Whether `far_seats` depends on the turn."""
    return 0 < free < 2 * far_domains
