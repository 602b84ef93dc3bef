"""Of the requests that wait in the router: which go now and where, and which had better wait a little for a worker to come free.

A job behind another prefill on a busy engine gains nothing by being there, and costs: engines compute prompts that wait together in the
same steps, so that a short one takes as long as the long one beside it. So while all workers that would suit a request are busy, the
router keeps it, and decides when one is about to be free: then it knows more, too. Pure.

Who loses most when others choose before it chooses first: those with a long cached prefix somewhere, then long prompts. But when there are more
than `SHORTEST_FIRST_FROM` unfinished prompts for each worker, the shortest go first, less what they have waited already. Nobody is kept for longer than
`KvAwareKnobs.hold_s`; small prompts are sent together as soon as that saves more time than it costs.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from .fleet import Candidate
from .policies import Decision, KvAware, Query

SHORTEST_FIRST_FROM = 2.0


@dataclass(eq=False, slots=True)
class Waiting:
    """`except_workers`: those that shall not have it, as long as there are others."""

    query: Query
    since_s: float
    except_workers: Sequence[str] = ()
    order: tuple[float, float] = (0.0, 0.0)


@dataclass(slots=True)
class Plan:
    """`look_again_s`: when to plan anew if nothing changes before; infinity when nobody is kept."""

    sends: list[tuple[Waiting, Decision]] = field(default_factory=list[tuple[Waiting, Decision]])
    look_again_s: float = math.inf


def plan(policy: KvAware, waiting: Sequence[Waiting], candidates: Sequence[Candidate], now_s: float) -> Plan:
    """`candidates`, which is never empty, must count all that was sent before."""
    made, known, left = Plan(), {candidate.lane: candidate for candidate in candidates}, len(waiting)
    if not waiting:
        return made
    held_until_s, shortest_s = min(one.since_s for one in waiting) + policy.knobs.hold_s, _shortest_s(waiting, candidates)
    for one in _in_order(policy, waiting, candidates, now_s):
        nobody_before_s = min(held_until_s, _free_s(policy, shortest_s, known.values(), left, now_s))
        if now_s < nobody_before_s:  # this one does not go, nor does anybody after it: workers only get more to do
            made.look_again_s = min(made.look_again_s, nobody_before_s)
            break
        choice = [candidate for candidate in known.values() if candidate.worker not in one.except_workers] or list(known.values())
        decision = policy.choose(choice, one.query, now_s)
        chosen = known[decision.lane]
        ready_s = policy.ready_s(chosen, one.query, left / len(known), now_s)
        if ready_s <= now_s or now_s >= one.since_s + policy.knobs.hold_s:
            made.sends.append((one, decision))
            left -= 1
        else:
            made.look_again_s = min(made.look_again_s, ready_s, one.since_s + policy.knobs.hold_s)
        known[decision.lane] = chosen.and_one(one.query)
    return made


def nobody_before_s(policy: KvAware, waiting: Sequence[Waiting], candidates: Sequence[Candidate], now_s: float) -> float:
    """Until then none of them goes. `waiting` is never empty."""
    held_until_s = min(one.since_s for one in waiting) + policy.knobs.hold_s
    return min(held_until_s, _free_s(policy, _shortest_s(waiting, candidates), candidates, len(waiting), now_s))


def _shortest_s(waiting: Sequence[Waiting], candidates: Iterable[Candidate]) -> dict[str, float]:
    """By lane: the least time that a prefill of one of them would take there."""
    prompts = [(one.query.prompt_length_tokens, one.query.cached_tokens_by_lane) for one in waiting]
    return {
        one.lane: one.prefill_base_s + one.prefill_per_token_s * min(tokens - cached.get(one.lane, 0) for tokens, cached in prompts)
        for one in candidates
    }


def _free_s(policy: KvAware, shortest_s: Mapping[str, float], candidates: Collection[Candidate], waiting: int, now_s: float) -> float:
    """When the first worker is free, for the shortest of so many that wait."""
    return min(policy.ready_for_s(one, shortest_s[one.lane], waiting / len(candidates), now_s) for one in candidates)


def _in_order(policy: KvAware, waiting: Sequence[Waiting], candidates: Sequence[Candidate], now_s: float) -> Iterator[Waiting]:
    if len(waiting) < 2:
        return iter(waiting)
    unfinished = len(waiting) + sum(candidate.queued_requests + candidate.running_prefills for candidate in candidates)
    shortest_first = unfinished > SHORTEST_FIRST_FROM * len(candidates)
    for one in waiting:
        times_s = [candidate.prefill_s(one.query) for candidate in candidates]
        least_s = min(times_s)
        if shortest_first:
            one.order = (least_s - (now_s - one.since_s), one.since_s)
        else:
            one.order = (least_s - max(times_s), -least_s)
    return iter(sorted(waiting, key=lambda one: one.order))
