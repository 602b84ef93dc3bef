"""Which worker each of the requests that wait should go to, and in what order there: decided for all of them together. Pure.

What shall be least is the sum of the times to their first tokens. At each worker the shortest prefill goes first, less what it has
waited already. So what a request costs at a worker is what it is expected to take there, with the prefills that go there before it, and its
own prefill once more for each that goes after it. The longest is placed first. Where all workers are alike that gives the least sum there is;
where caches make them unlike, each request is then placed once more, now that all others are known. What costs the same goes where all will be
computed soonest: long prompts do not meet on one worker.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from .fleet import Candidate
from .policies import Decision, KvAware, Query, describe

PLACED_AGAIN = 32
"""When more wait, nobody is placed a second time: the decision would take long, and caches matter less then than queues."""


@dataclass(eq=False, slots=True)
class Waiting:
    """A request that waits in the router. `except_workers`: those that shall not have it, as long as there are others."""

    query: Query
    since_s: float
    except_workers: Sequence[str] = ()


@dataclass(slots=True)
class _Placed:
    """`key`: the least goes first."""

    key: float
    prefill_s: float
    one: Waiting
    decision: Decision


@dataclass(slots=True)
class Turns:
    """What one worker should be sent, in this order. `candidate`: as it is now."""

    candidate: Candidate
    placed: list[_Placed] = field(default_factory=list[_Placed])

    @property
    def order(self) -> list[tuple[Waiting, Decision]]:
        return [(placed.one, placed.decision) for placed in self.placed]

    def position(self, key: float) -> int:
        return bisect_left(self.placed, key, key=lambda placed: placed.key)

    def all_s(self) -> float:
        return sum(placed.prefill_s for placed in self.placed)

    def extra_s(self, key: float, prefill_s: float) -> float:
        """What one more prefill there waits for those before it, and makes those after it wait."""
        position = self.position(key)
        return sum(placed.prefill_s for placed in self.placed[:position]) + prefill_s * (len(self.placed) - position)

    def promised(self) -> Candidate:
        """With room for all of them."""
        candidate = self.candidate
        for placed in self.placed:
            candidate = candidate.promised(placed.one.query)
        return candidate


def assign(policy: KvAware, waiting: Sequence[Waiting], candidates: Sequence[Candidate], now_s: float) -> list[Turns]:
    """Only of workers that should be sent something. `candidates`, which is never empty, must count all that was sent before."""
    if len(waiting) == 1:
        [one] = waiting
        decision = policy.choose(_choice(one, candidates), one.query, now_s)
        chosen = next(candidate for candidate in candidates if candidate.lane == decision.lane)
        return [Turns(chosen, [_Placed(0.0, 0.0, one, decision)])]
    places = _Places(policy, candidates, now_s)
    shortest_s = {id(one): min(candidate.prefill_s(one.query) for candidate in candidates) for one in waiting}
    in_order = sorted(waiting, key=lambda one: (now_s - one.since_s - shortest_s[id(one)], one.since_s))
    for one in in_order:
        places.add(one, len(waiting))
    if len(waiting) <= PLACED_AGAIN:
        for one in in_order:
            places.remove(one)
            places.add(one, len(waiting))
    return list(places.turns.values())


class _Places:
    """`turns`: by lane, where anything is."""

    def __init__(self, policy: KvAware, candidates: Sequence[Candidate], now_s: float) -> None:
        self._policy = policy
        self._now_s = now_s
        self._candidates = {candidate.lane: candidate for candidate in candidates}
        self._promised = dict(self._candidates)
        self._lane_of: dict[int, str] = {}
        self.turns: dict[str, Turns] = {}

    def remove(self, one: Waiting) -> None:
        lane = self._lane_of.pop(id(one))
        turns = self.turns[lane]
        turns.placed = [placed for placed in turns.placed if placed.one is not one]
        self._promised[lane] = turns.promised()
        if not turns.placed:
            del self.turns[lane]

    def add(self, one: Waiting, of: int) -> None:
        query, waited_s, known = one.query, self._now_s - one.since_s, self._promised
        choice = self._policy.that_may(_choice(one, list(known.values())), query)
        costs_s, ends_s = self._policy.expected_s(choice, query, self._now_s), dict[str, float]()
        for lane, turns in self.turns.items():
            if lane in costs_s:
                prefill_s = known[lane].prefill_s(query)
                ends_s[lane] = costs_s[lane] + turns.all_s()
                costs_s[lane] += turns.extra_s(prefill_s - waited_s, prefill_s)
        chosen = self._policy.pick(choice, costs_s, ends_s)
        lane, prefill_s = chosen.lane, chosen.prefill_s(query)
        reason = f"least waiting for all {of} together, {costs_s[lane] * 1e3:.0f} ms for this: {describe(chosen, query, self._now_s)}"
        turns = self.turns.get(lane) or self.turns.setdefault(lane, Turns(self._candidates[lane]))
        placed = _Placed(prefill_s - waited_s, prefill_s, one, Decision(lane, reason, costs_s))
        turns.placed.insert(turns.position(placed.key), placed)
        self._lane_of[id(one)] = lane
        self._promised[lane] = chosen.promised(query)


def _choice(one: Waiting, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    if not one.except_workers:
        return candidates
    return [candidate for candidate in candidates if candidate.worker not in one.except_workers] or candidates
