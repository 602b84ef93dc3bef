"""Who gets a request. Policies are synchronous and pure towards the outside: candidates and a query in, a decision with its reason out.

The same objects run in the live router and in replays. Randomness and counters belong to the policy object and are seeded.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..schemas.errors import SetupError
from .fleet import Candidate


@dataclass(frozen=True)
class Query:
    """What a policy may know of a request."""

    request_id: str
    prompt_length_tokens: int


@dataclass(frozen=True)
class Decision:
    """`scores` has one entry for each candidate the policy compared, by lane; lower is better."""

    lane: str
    reason: str
    scores: Mapping[str, float] = field(default_factory=dict[str, float])


class Policy(Protocol):
    def choose(self, candidates: Sequence[Candidate], query: Query) -> Decision:
        """Picks one of `candidates`, which is never empty."""
        ...


class RoundRobin:
    """Each candidate in turn."""

    def __init__(self, seed: int = 0) -> None:
        self._turn = seed

    def choose(self, candidates: Sequence[Candidate], query: Query) -> Decision:
        chosen = candidates[self._turn % len(candidates)]
        self._turn += 1
        return Decision(chosen.lane, f"round robin: turn {self._turn} of {len(candidates)} candidates")


class Random:
    """Any candidate, all equally likely."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def choose(self, candidates: Sequence[Candidate], query: Query) -> Decision:
        chosen = self._random.choice(candidates)
        return Decision(chosen.lane, f"random: one of {len(candidates)} candidates")


class LeastLoaded:
    """The fewest requests queued and running; among equals the fewest prompt tokens in work, then each in turn."""

    def __init__(self, seed: int = 0) -> None:
        self._turn = seed

    def choose(self, candidates: Sequence[Candidate], query: Query) -> Decision:
        best = min((candidate.load, candidate.running_prompt_tokens) for candidate in candidates)
        equals = [candidate for candidate in candidates if (candidate.load, candidate.running_prompt_tokens) == best]
        chosen = equals[self._turn % len(equals)]
        self._turn += 1
        return Decision(
            chosen.lane,
            f"least loaded: {chosen.queued_requests} queued and {chosen.running_requests} running",
            {candidate.lane: float(candidate.load) for candidate in candidates},
        )


POLICIES: Mapping[str, Callable[[int], Policy]] = {"round_robin": RoundRobin, "random": Random, "least_loaded": LeastLoaded}


def make_policy(name: str, seed: int = 0) -> Policy:
    """Raises SetupError naming the policies there are."""
    if name not in POLICIES:
        raise SetupError(f"no routing policy is called {name!r}; there are {', '.join(sorted(POLICIES))}")
    return POLICIES[name](seed)
