"""Which worker each of the requests that wait should go to, and in what order there: decided for all of them together. Pure.

What shall be least is the sum of the times to their first tokens. At each worker the shortest prefill goes first, less what it has
waited already. So what a request costs at a worker is what it is expected to take there, with the prefills that go there before it, and its
own prefill once more for each that goes after it. The longest is placed first. Where all workers are alike that gives the least sum there is;
where caches make them unlike, each request is then placed once more, now that all others are known. What costs the same goes where all will be
computed soonest: long prompts do not meet on one worker.
"""

from bisect import insort
from collections.abc import Mapping, Sequence
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


@dataclass(eq=False, slots=True)
class _Placed:
    """`key`: the least goes first. `least_s`: what it would cost where it cost least, if it were alone there."""

    key: float
    prefill_s: float
    one: Waiting
    costs_s: Mapping[str, float]
    least_s: float


@dataclass(slots=True)
class Turns:
    """What one worker should be sent, in this order. `candidate`: as it is now; `work_s`: of all of them."""

    candidate: Candidate
    placed: list[_Placed] = field(default_factory=list[_Placed])
    work_s: float = 0.0

    @property
    def order(self) -> list[Waiting]:
        return [placed.one for placed in self.placed]

    def extra_s(self, key: float, prefill_s: float) -> float:
        """What one more prefill there waits for those before it, and makes those after it wait."""
        extra_s = 0.0
        for placed in self.placed:
            extra_s += placed.prefill_s if placed.key < key else prefill_s
        return extra_s

    def decision(self, place: int, of: int, now_s: float) -> Decision:
        placed, lane = self.placed[place], self.candidate.lane
        why = "soonest first token" if of == 1 else f"least waiting for all {of} together"
        words = describe(self.candidate, placed.one.query, now_s)
        return Decision(lane, f"{why}, in {placed.costs_s[lane] * 1e3:.0f} ms: {words}", placed.costs_s)


def assign(policy: KvAware, waiting: Sequence[Waiting], candidates: Sequence[Candidate], now_s: float) -> list[Turns]:
    """Only of workers that should be sent something. `candidates`, which is never empty, must count all that was sent before."""
    places = _Places(policy, candidates, now_s)
    if len(waiting) > 1:
        shortest_s = {id(one): min(candidate.prefill_s(one.query) for candidate in candidates) for one in waiting}
        waiting = sorted(waiting, key=lambda one: (now_s - one.since_s - shortest_s[id(one)], one.since_s))
    for one in waiting:
        places.add(one)
    if 1 < len(waiting) <= PLACED_AGAIN:
        for one in waiting:
            places.move(one)
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

    def add(self, one: Waiting) -> None:
        query, waited_s, promised = one.query, self._now_s - one.since_s, self._promised
        choice = self._policy.that_may(_choice(one, list(promised.values())), query)
        costs_s, ends_s = self._policy.expected_s(choice, query, self._now_s), dict[str, float]()
        least_s = min(costs_s.values())
        for lane, turns in self.turns.items():
            if lane in costs_s:
                prefill_s = promised[lane].prefill_s(query)
                ends_s[lane] = costs_s[lane] + turns.work_s
                costs_s[lane] += turns.extra_s(prefill_s - waited_s, prefill_s)
        chosen = self._policy.pick(choice, costs_s, ends_s)
        lane, prefill_s = chosen.lane, chosen.prefill_s(query)
        turns = self.turns.get(lane) or self.turns.setdefault(lane, Turns(self._candidates[lane]))
        insort(turns.placed, _Placed(prefill_s - waited_s, prefill_s, one, costs_s, least_s), key=_key)
        turns.work_s += prefill_s
        self._lane_of[id(one)] = lane
        promised[lane] = chosen.promised(query)

    def move(self, one: Waiting) -> None:
        """To where it costs least now, unless it is alone where nothing is better."""
        lane = self._lane_of[id(one)]
        turns = self.turns[lane]
        [placed] = (placed for placed in turns.placed if placed.one is one)
        if len(turns.placed) == 1 and placed.costs_s[lane] <= placed.least_s:
            return
        turns.placed.remove(placed)
        turns.work_s -= placed.prefill_s
        if not turns.placed:
            del self.turns[lane]
        self._promised[lane] = self._promised[lane].promised(one.query, taken_back=True)
        self.add(one)


def _key(placed: _Placed) -> float:
    return placed.key


def _choice(one: Waiting, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    if not one.except_workers:
        return candidates
    return [candidate for candidate in candidates if candidate.worker not in one.except_workers] or candidates
