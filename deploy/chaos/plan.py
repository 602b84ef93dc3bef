"""What is done to the system, and when: a pure function of the seed and the names of the parts.

Kinds are drawn from a bag, so that even a short run has each of them: the first bag holds one of each, later ones as many as the
kind weighs.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from ...schemas.errors import SetupError

WEIGHTS = {
    "kill": 4,
    "freeze": 3,
    "partition": 3,
    "client-cut": 1,
    "messages": 3,
    "broker-stop": 1,
    "broker-kill": 1,
    "consumer": 2,
    "stream": 1,
}
"""kill: SIGKILL of a worker or router. freeze: SIGSTOP, later SIGCONT. partition: its connection to the broker is cut or silent.
client-cut: the same for a client. messages: plain messages of one process are lost, doubled or reordered. broker-stop, broker-kill:
SIGTERM or SIGKILL, then a start on the same store. consumer: a durable is deleted. stream: one that holds no accepted work is."""

KINDS = tuple(WEIGHTS)
MANNERS = {
    "partition": ("cut", "silent"),
    "client-cut": ("cut", "silent"),
    "messages": ("lose", "double", "reorder"),
}
DURATIONS_S = {
    "freeze": (0.5, 16.0),
    "partition": (0.5, 16.0),
    "client-cut": (0.5, 12.0),
    "messages": (4.0, 20.0),
    "broker-stop": (0.0, 3.0),
    "broker-kill": (0.0, 6.0),
}
"""Up to more than a worker card's life (3 s) and the time after which the broker delivers again (10 s)."""


@dataclass(frozen=True)
class Targets:
    workers: Sequence[str]
    routers: Sequence[str]
    clients: Sequence[str]


@dataclass(frozen=True)
class Fault:
    """`target` is empty where the broker is meant. `dice`, from 0 to 1, chooses among what is there at that moment."""

    at_s: float
    kind: str
    target: str
    manner: str
    duration_s: float
    dice: float

    def __str__(self) -> str:
        lasting = f" for {self.duration_s:.1f} s" if self.duration_s else ""
        return " ".join(word for word in (self.kind, self.target, self.manner) if word) + lasting


def kinds_named(names: str) -> tuple[str, ...]:
    """From a list with commas; empty: all. Raises SetupError for a kind that does not exist."""
    kinds = tuple(name.strip() for name in names.split(",") if name.strip()) or KINDS
    for kind in kinds:
        if kind not in WEIGHTS:
            raise SetupError(f"no fault is called {kind!r}; there are {', '.join(KINDS)}")
    return kinds


def plan(seed: int, duration_s: float, every_s: float, kinds: Sequence[str], targets: Targets) -> list[Fault]:
    """Faults about `every_s` apart, some at the same time as others; all are over at `duration_s`."""
    dice = random.Random(seed)
    bag = list(kinds)
    dice.shuffle(bag)
    at_s, faults = dice.uniform(0.2, 1.0) * every_s, list[Fault]()
    while at_s < duration_s - 1.0:
        if not bag:
            bag = [kind for kind in kinds for _ in range(WEIGHTS[kind])]
            dice.shuffle(bag)
        faults.append(_fault(dice, bag.pop(), at_s, duration_s, targets))
        at_s += dice.uniform(0.3, 1.7) * every_s
    return faults


def _fault(dice: random.Random, kind: str, at_s: float, end_s: float, targets: Targets) -> Fault:
    processes = [*targets.workers, *targets.routers]
    names = {"kill": processes, "freeze": processes, "partition": processes, "messages": processes, "client-cut": targets.clients}
    shortest_s, longest_s = DURATIONS_S.get(kind, (0.0, 0.0))
    longest_s = max(shortest_s, min(longest_s, end_s / 4))  # a short run has room for several
    return Fault(
        at_s=round(at_s, 2),
        kind=kind,
        target=dice.choice(list(names.get(kind, [""]))),
        manner=dice.choice(MANNERS.get(kind, ("",))),
        duration_s=round(min(dice.uniform(shortest_s, longest_s), end_s - at_s), 2),
        dice=dice.random(),
    )
