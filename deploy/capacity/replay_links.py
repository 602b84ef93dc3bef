"""The links that KV caches travel over, on a virtual clock: bandwidth shared by all transfers at once, and a latency for each.

Pure. Workers are dealt to topology domains in turn. A transfer inside a domain uses that domain's link, one between two domains the
link between domains. All transfers on a link at a time get equal parts of it, so that a new one delays those under way.
"""

import math
from dataclasses import dataclass, field

from ...schemas.errors import SetupError

BETWEEN = "between"


@dataclass(frozen=True)
class Link:
    """`bytes_per_s`: of each domain's link; `between_bytes_per_s`: of the one that joins domains (0: as `bytes_per_s`)."""

    bytes_per_s: float = math.inf
    latency_s: float = 0.0
    kv_bytes_per_token: int = 131_072
    domains: int = 1
    between_bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        """Raises SetupError."""
        if self.bytes_per_s <= 0:
            raise SetupError(f"the bandwidth of a link must be above 0 bytes/s, not {self.bytes_per_s}")
        if self.between_bytes_per_s < 0:
            raise SetupError(f"the bandwidth between domains must be at least 0 bytes/s, not {self.between_bytes_per_s}")
        if self.latency_s < 0:
            raise SetupError(f"the latency of a link must be at least 0 s, not {self.latency_s}")
        if self.kv_bytes_per_token < 0:
            raise SetupError(f"KV bytes per token must be at least 0, not {self.kv_bytes_per_token}")
        if self.domains < 1:
            raise SetupError(f"there must be at least 1 topology domain, not {self.domains}")

    def domain(self, place: int) -> str:
        """Of the worker at this place of its pool."""
        return f"domain-{place % self.domains}"

    def name(self, source: str, target: str) -> str:
        return source if source == target else BETWEEN

    def speed(self, name: str) -> float:
        return (self.between_bytes_per_s or self.bytes_per_s) if name == BETWEEN else self.bytes_per_s


@dataclass
class _Shared:
    """One link. `served` is what each transfer since the start would have got: a transfer ends when `served` reaches its mark."""

    bytes_per_s: float
    served: float = 0.0
    at_s: float = 0.0
    busy_s: float = 0.0
    marks: dict[int, float] = field(default_factory=dict[int, float])

    def catch_up(self, now_s: float) -> None:
        if self.marks:
            self.served += (now_s - self.at_s) * self.bytes_per_s / len(self.marks)
            self.busy_s += now_s - self.at_s
        else:
            self.served = 0.0
        self.at_s = now_s

    def next_end_s(self) -> float:
        if not self.marks:
            return math.inf
        return self.at_s + max(0.0, min(self.marks.values()) - self.served) * len(self.marks) / self.bytes_per_s


class Links:
    """Transfers under way. Whoever drives it calls `start`, then `ended` no later than `next_end_s()`."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._shared: dict[str, _Shared] = {}

    def start(self, transfer: int, source: str, target: str, num_bytes: float, now_s: float) -> None:
        """Between two topology domains. The latency is the caller's to add: it costs no bandwidth."""
        name = self._link.name(source, target)
        shared = self._shared.get(name)
        if shared is None:
            shared = self._shared[name] = _Shared(self._link.speed(name), at_s=now_s)
        shared.catch_up(now_s)
        shared.marks[transfer] = shared.served + num_bytes

    def next_end_s(self) -> float:
        return min((shared.next_end_s() for shared in self._shared.values()), default=math.inf)

    def ended(self, now_s: float) -> list[int]:
        """Those that are through by now, in the order in which they started."""
        through = list[int]()
        for shared in self._shared.values():
            if shared.next_end_s() <= now_s:
                shared.catch_up(now_s)
                least = min(shared.marks.values())
                done = [transfer for transfer, mark in shared.marks.items() if mark <= max(least, shared.served)]
                for transfer in done:
                    del shared.marks[transfer]
                through += done
        return through

    def busy_s(self, now_s: float) -> dict[str, float]:
        """For each link used so far, how long it has been busy."""
        for shared in self._shared.values():
            shared.catch_up(now_s)
        return {name: shared.busy_s for name, shared in self._shared.items()}
