"""Who gets a request. Policies are synchronous and pure towards the outside: candidates and a query in, a decision with its reason out.

The same objects run in the live router and in replays. Randomness and counters belong to the policy object and are seeded.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..schemas.errors import SetupError
from .fleet import Candidate


@dataclass(frozen=True)
class Query:
    """What a policy may know of a request. `matched_blocks`: by lane, how many leading blocks of the prompt are cached there.
    `session_lane`: where the last turn of the same session went.
    """

    request_id: str
    prompt_length_tokens: int
    block_size_tokens: int = 16
    matched_blocks: Mapping[str, int] = field(default_factory=dict[str, int])
    session_lane: str = ""

    def cached_tokens(self, lane: str) -> int:
        """What that worker's engine will find in its cache: it always computes the last token itself."""
        blocks = min(self.matched_blocks.get(lane, 0), (self.prompt_length_tokens - 1) // self.block_size_tokens)
        return blocks * self.block_size_tokens


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


class PowerOfTwo:
    """The less loaded of two candidates drawn at random: nearly as even as the least loaded, and never a herd."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def choose(self, candidates: Sequence[Candidate], query: Query) -> Decision:
        drawn = self._random.sample(list(candidates), min(2, len(candidates)))
        chosen = min(drawn, key=lambda candidate: (candidate.load, candidate.running_prompt_tokens))
        scores = {candidate.lane: float(candidate.load) for candidate in drawn}
        return Decision(chosen.lane, f"power of two: {chosen.load} in work, of {len(drawn)} drawn", scores)


@dataclass(frozen=True)
class KvAwareKnobs:
    """Times in seconds. `overlap_weight`: what a cached token is worth (0: ignore caches, 1: what it saves). `load_weight`: what a second of queued
    work counts (0: ignore load, above 1: spread more). `temperature_s`: 0 takes the best; above, others within about so many
    seconds of it are taken too, which spreads a hot prefix over more caches.

    `session_affinity_s`: how many seconds sooner another worker must be to get the next turn of a session.

    Conditional disaggregation: a prompt of which at most `direct_max_new_tokens` must be computed (0: none) may go to a decode
    worker without a handoff, where the prefill there, with its cost to the `interference_weight` of the answers running there,
    is less than the way over a prefill worker with its handoff of `handoff_s`.
    """

    overlap_weight: float = 1.0
    load_weight: float = 1.0
    temperature_s: float = 0.0
    session_affinity_s: float = 0.0
    direct_max_new_tokens: int = 0
    handoff_s: float = 0.03
    interference_weight: float = 0.5


class KvAware:
    """The lowest expected time to the first token: the work queued there, then the prefill of what is not cached there.

    Ties go to the less loaded worker, then in turn, so that workers that are all idle and all cold share.
    """

    def __init__(self, seed: int = 0, knobs: KvAwareKnobs | None = None) -> None:
        self._knobs = knobs or KvAwareKnobs()
        self._random = random.Random(seed)
        self._turn = seed

    def choose(self, candidates: Sequence[Candidate], query: Query) -> Decision:
        candidates = [candidate for candidate in candidates if self._may_have(candidate, query)] or candidates
        scores = {candidate.lane: self._expected_s(candidate, query) for candidate in candidates}
        chosen = self._pick(candidates, scores)
        reason = f"soonest first token, in {scores[chosen.lane] * 1e3:.0f} ms: {describe(chosen, query)}"
        return Decision(chosen.lane, reason, scores)

    def _expected_s(self, candidate: Candidate, query: Query) -> float:
        new_tokens = query.prompt_length_tokens - self._knobs.overlap_weight * query.cached_tokens(candidate.lane)
        prefill_s = candidate.timing.seconds(new_tokens)
        expected_s = self._knobs.load_weight * candidate.work_s + prefill_s
        if query.session_lane not in ("", candidate.lane):
            expected_s += self._knobs.session_affinity_s
        if candidate.role == "decode":
            return expected_s + self._knobs.interference_weight * candidate.running_requests * prefill_s
        return expected_s + (self._knobs.handoff_s if candidate.role == "prefill" and self._knobs.direct_max_new_tokens else 0.0)

    def _may_have(self, candidate: Candidate, query: Query) -> bool:
        new_tokens = query.prompt_length_tokens - query.cached_tokens(candidate.lane)
        return candidate.role != "decode" or new_tokens <= self._knobs.direct_max_new_tokens

    def _pick(self, candidates: Sequence[Candidate], scores: Mapping[str, float]) -> Candidate:
        best = min(scores.values())
        if self._knobs.temperature_s > 0.0:
            weights = [math.exp((best - scores[candidate.lane]) / self._knobs.temperature_s) for candidate in candidates]
            return self._random.choices(candidates, weights)[0]
        close = [candidate for candidate in candidates if scores[candidate.lane] <= best * (1 + TIE)]
        least = min(candidate.load for candidate in close)
        equals = [candidate for candidate in close if candidate.load == least]
        self._turn += 1
        return equals[self._turn % len(equals)]


def describe(candidate: Candidate, query: Query) -> str:
    """What is known of a candidate for this request, in words."""
    return (
        f"{candidate.queued_requests} queued, {candidate.running_requests} running, {candidate.work_s * 1e3:.0f} ms of work before it, "
        f"{query.cached_tokens(candidate.lane)} of {query.prompt_length_tokens} tokens cached"
    )


TIE = 0.02
"""Expected times closer than this are equal: the timing model is no better."""

POLICIES: Mapping[str, Callable[[int], Policy]] = {
    "kv_aware": KvAware,
    "least_loaded": LeastLoaded,
    "power_of_two": PowerOfTwo,
    "random": Random,
    "round_robin": RoundRobin,
}
DEFAULT_POLICY = "kv_aware"


def make_policy(name: str, seed: int = 0, knobs: KvAwareKnobs | None = None) -> Policy:
    """`knobs` are those of `kv_aware`. Raises SetupError naming the policies there are."""
    if name not in POLICIES:
        raise SetupError(f"no routing policy is called {name!r}; there are {', '.join(sorted(POLICIES))}")
    return KvAware(seed, knobs) if name == "kv_aware" else POLICIES[name](seed)
