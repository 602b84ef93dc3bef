"""Who gets a request. Policies are synchronous and pure towards the outside: candidates and a query in, a decision with its reason out.

The same objects run in the live router and in replays. Randomness and counters belong to the policy object and are seeded.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
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

    @cached_property
    def cached_tokens_by_lane(self) -> Mapping[str, int]:
        """What each worker's engine will find in its cache, where it is anything: it always computes the last token itself."""
        most, size_tokens = (self.prompt_length_tokens - 1) // self.block_size_tokens, self.block_size_tokens
        return {lane: (blocks if blocks < most else most) * size_tokens for lane, blocks in self.matched_blocks.items()}

    def cached_tokens(self, lane: str) -> int:
        return self.cached_tokens_by_lane.get(lane, 0)


@dataclass(frozen=True)
class Decision:
    """`scores` has one entry for each candidate the policy compared, by lane; lower is better."""

    lane: str
    reason: str
    scores: Mapping[str, float] = field(default_factory=dict[str, float])


class Policy(Protocol):
    def choose(self, candidates: Sequence[Candidate], query: Query, now_s: float = 0.0) -> Decision:
        """Picks one of `candidates`, which is never empty. `now_s`: on the clock of `Candidate.told_s`."""
        ...


class RoundRobin:
    """Each candidate in turn."""

    def __init__(self, seed: int = 0) -> None:
        self._turn = seed

    def choose(self, candidates: Sequence[Candidate], query: Query, now_s: float = 0.0) -> Decision:
        chosen = candidates[self._turn % len(candidates)]
        self._turn += 1
        return Decision(chosen.lane, f"round robin: turn {self._turn} of {len(candidates)} candidates")


class Random:
    """Any candidate, all equally likely."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def choose(self, candidates: Sequence[Candidate], query: Query, now_s: float = 0.0) -> Decision:
        chosen = self._random.choice(candidates)
        return Decision(chosen.lane, f"random: one of {len(candidates)} candidates")


class LeastLoaded:
    """The fewest requests queued and running; among equals the fewest prompt tokens in work, then each in turn."""

    def __init__(self, seed: int = 0) -> None:
        self._turn = seed

    def choose(self, candidates: Sequence[Candidate], query: Query, now_s: float = 0.0) -> Decision:
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

    def choose(self, candidates: Sequence[Candidate], query: Query, now_s: float = 0.0) -> Decision:
        drawn = self._random.sample(list(candidates), min(2, len(candidates)))
        chosen = min(drawn, key=lambda candidate: (candidate.load, candidate.running_prompt_tokens))
        scores = {candidate.lane: float(candidate.load) for candidate in drawn}
        return Decision(chosen.lane, f"power of two: {chosen.load} in work, of {len(drawn)} drawn", scores)


NOTHING: Mapping[str, float] = {}


@dataclass(frozen=True)
class KvAwareKnobs:
    """Times in seconds. `overlap_weight`: what a cached token is worth (0: ignore caches, 1: what it saves). `load_weight`: what a second of queued
    work counts (0: ignore load, above 1: spread more). `temperature_s`: 0 takes the best; above, others within about so many
    seconds of it are taken too, which spreads a hot prefix over more caches.

    `session_affinity_s`: how many seconds sooner another worker must be to get the next turn of a session.

    Conditional disaggregation: a prompt of which at most `direct_max_new_tokens` must be computed (0: none) may go to a decode
    worker without a handoff, where the prefill there, with its cost to the `interference_weight` of the answers running there,
    is less than the way over a prefill worker with its handoff of `handoff_s`.

    `decode_weight`: what a token in the KV cache counts where decoding goes on, in prompt tokens to compute: it makes every step longer.
    `room_wait_s`: seconds until a whole KV cache in use has been given back, for requests that find no room. `hold_s`: the longest that
    the router keeps a request for want of a free worker (0: not at all). `lead`: how long before a worker is free the next is sent, in
    times that its shortest prefill takes.

    `far_pull_s`: how much longer the pull of a KV cache takes from another topology domain, for prefill workers whose own domain has no
    decode worker with room while another has.
    """

    overlap_weight: float = 1.0
    load_weight: float = 1.0
    temperature_s: float = 0.0
    session_affinity_s: float = 0.0
    direct_max_new_tokens: int = 0
    handoff_s: float = 0.03
    interference_weight: float = 0.5
    decode_weight: float = 0.1
    room_wait_s: float = 15.0
    hold_s: float = 2.0
    lead: float = 1.5
    far_pull_s: float = 0.05


class KvAware:
    """The lowest expected time to the first token: the work queued there, then the prefill of what is not cached there.

    Ties go to the less loaded worker, then to the one that was given the fewest tokens to compute so far: what is computed there is
    cached there, and where caches fill alike, nothing is pushed out of one while another has room.
    """

    def __init__(self, seed: int = 0, knobs: KvAwareKnobs | None = None) -> None:
        self.knobs = knobs or KvAwareKnobs()
        self._random = random.Random(seed)
        self._given_tokens: dict[str, int] = {}

    def choose(self, candidates: Sequence[Candidate], query: Query, now_s: float = 0.0) -> Decision:
        candidates = self.that_may(candidates, query)
        scores = self.expected_s(candidates, query, now_s)
        chosen = self.pick(candidates, scores)
        reason = f"soonest first token, in {scores[chosen.lane] * 1e3:.0f} ms: {describe(chosen, query, now_s)}"
        return Decision(chosen.lane, reason, scores)

    def ready_s(self, candidate: Candidate, query: Query, behind: int, now_s: float, delivery_s: float = 0.0) -> float:
        """When it should be sent this job: a little before the last prefill there ends, but not while another waits for that too,
        and not before that prefill has begun: they would be computed together, and both end when the longer does.

        Short prompts are sent together. Each saves a step's own time for itself and those `behind` it, and costs only its own tokens' time.

        `delivery_s`: how long a job is on its way. What the worker will have done by then is no reason to wait.
        """
        return self.ready_for_s(candidate, candidate.prefill_s(query), behind, now_s, delivery_s)

    def ready_for_s(self, candidate: Candidate, prefill_s: float, behind: int, now_s: float, delivery_s: float = 0.0) -> float:
        """As `ready_s`, for a job that takes so long there."""
        free_s, base_s = now_s + candidate.work_s(now_s) - delivery_s, candidate.prefill_base_s
        in_hand = candidate.queued_requests + candidate.running_prefills
        if in_hand <= 1:
            free_s -= self.knobs.lead * base_s
        if in_hand == 1:
            free_s = max(free_s, candidate.sent_s + BEGINS * base_s)
        saved_s = base_s * behind
        return free_s - saved_s if prefill_s <= 2 * base_s + saved_s else free_s

    def expected_s(self, candidates: Sequence[Candidate], query: Query, now_s: float) -> dict[str, float]:
        """By lane. One loop without calls: it runs once for every worker in every decision."""
        knobs, prompt_tokens, cached = self.knobs, query.prompt_length_tokens, query.cached_tokens_by_lane.get
        overlap_weight, load_weight, session_lane = knobs.overlap_weight, knobs.load_weight, query.session_lane
        handoff_s = knobs.handoff_s if knobs.direct_max_new_tokens else 0.0
        prompt_blocks, scores = -(-prompt_tokens // query.block_size_tokens), dict[str, float]()
        for candidate in candidates:
            lane = candidate.lane
            new_tokens = prompt_tokens - overlap_weight * cached(lane, 0)
            prefill_s = candidate.prefill_base_s + candidate.prefill_per_token_s * new_tokens
            work_s, left_s = candidate.queued_work_s, candidate.prefill_left_s - (now_s - candidate.told_s)
            if left_s > 0.0:
                work_s += left_s
            expected_s = load_weight * work_s + prefill_s
            if candidate.free_blocks < prompt_blocks and candidate.capacity_blocks:
                expected_s += knobs.room_wait_s * (prompt_blocks - candidate.free_blocks) / candidate.capacity_blocks
            if session_lane and session_lane != lane:
                expected_s += knobs.session_affinity_s
            if candidate.role == "decode":
                expected_s += knobs.interference_weight * candidate.running_requests * prefill_s
            elif candidate.role == "prefill":
                expected_s += handoff_s
                if candidate.is_far:
                    expected_s += knobs.far_pull_s
            else:
                expected_s += knobs.decode_weight * candidate.prefill_per_token_s * candidate.used_blocks * query.block_size_tokens
            scores[lane] = expected_s
        return scores

    def that_may(self, candidates: Sequence[Candidate], query: Query) -> Sequence[Candidate]:
        """Decode workers may have only prompts of which little is left to compute, or all when there are no others."""
        enough, cached = query.prompt_length_tokens - self.knobs.direct_max_new_tokens, query.cached_tokens_by_lane.get
        return [candidate for candidate in candidates if candidate.role != "decode" or cached(candidate.lane, 0) >= enough] or candidates

    def pick(self, candidates: Sequence[Candidate], scores: Mapping[str, float], ends_s: Mapping[str, float] = NOTHING) -> Candidate:
        """`ends_s`: when each would have computed all that goes there, where that is not the score."""
        best = min(scores.values())
        if self.knobs.temperature_s > 0.0:
            weights = [math.exp((best - scores[candidate.lane]) / self.knobs.temperature_s) for candidate in candidates]
            return self._random.choices(candidates, weights)[0]
        limit = best * (1 + TIE)
        close = [candidate for candidate in candidates if scores[candidate.lane] <= limit]
        if ends_s and len(close) > 1:
            ends = [ends_s.get(candidate.lane, scores[candidate.lane]) for candidate in close]
            limit = min(ends) * (1 + TIE)
            close = [candidate for candidate, end_s in zip(close, ends, strict=True) if end_s <= limit]
        given_tokens = self._given_tokens
        return min(close, key=lambda candidate: (candidate.load, given_tokens.get(candidate.lane, 0)))

    def given(self, candidate: Candidate, query: Query) -> None:
        """This request goes there. Nobody is further behind than its cache holds: one that is new catches up no more than that."""
        lane, given_tokens = candidate.lane, self._given_tokens
        if len(given_tokens) > REMEMBERED_LANES:
            given_tokens.clear()
        least = max(given_tokens.values(), default=0) - candidate.capacity_blocks * query.block_size_tokens
        given_tokens[lane] = max(given_tokens.get(lane, 0), least) + query.prompt_length_tokens - query.cached_tokens(lane)


def describe(candidate: Candidate, query: Query, now_s: float = 0.0) -> str:
    """What is known of a candidate for this request, in words."""
    return (
        f"{candidate.queued_requests} queued, {candidate.running_requests} running, {candidate.work_s(now_s) * 1e3:.0f} ms of work before it, "
        f"{query.cached_tokens(candidate.lane)} of {query.prompt_length_tokens} tokens cached"
    )


TIE = 0.02
"""Expected times closer than this are equal: the timing model is no better."""

REMEMBERED_LANES = 10_000

BEGINS = 0.75
"""A prefill has begun so many times of its worker's `base` after it was sent: it waits for a decode step at most, which is a part of that."""

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
