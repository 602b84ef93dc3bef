"""Of the requests that wait in the router: which go now and where, and which had better wait a little for a worker to come free.

A job behind another prefill on a busy engine gains nothing by being there, and costs: engines compute prompts that wait together in the
same steps, so that a short one takes as long as the long one beside it. So while the worker that a request should go to is busy, the
router keeps it, and decides when one is about to be free: then it knows more, too. About to be free is a worker that will be when the job
gets there, so that many short prefills are not sent one by one, each after the word that the one before has ended. Pure.

Who should go where, and after whom, is `assignment`'s to say. Nobody is kept for longer than `KvAwareKnobs.hold_s`; small prompts are sent
together as soon as that saves more time than it costs.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .assignment import Waiting, assign
from .fleet import Candidate
from .policies import Decision, KvAware


@dataclass(slots=True)
class Plan:
    """`look_again_s`: when to plan anew if nothing changes before; infinity when nobody is kept. `kept`: by lane, how many of those that
    are kept would go there.
    """

    sends: list[tuple[Waiting, Decision]] = field(default_factory=list[tuple[Waiting, Decision]])
    look_again_s: float = math.inf
    kept: dict[str, int] = field(default_factory=dict[str, int])


def plan(policy: KvAware, waiting: Sequence[Waiting], candidates: Sequence[Candidate], now_s: float, delivery_s: float = 0.0) -> Plan:
    """`candidates`, which is never empty, must count all that was sent before. `delivery_s`: how long a job is on its way to a worker."""
    made = Plan()
    for turns in assign(policy, waiting, candidates, now_s):
        candidate, is_open = turns.candidate, True
        for place, one in enumerate(turns.order):
            must_s = one.since_s + policy.knobs.hold_s
            behind = len(turns.placed) - place - 1
            ready_s = policy.ready_s(candidate, one.query, behind, now_s, delivery_s) if is_open else math.inf
            if ready_s <= now_s or must_s <= now_s:
                made.sends.append((one, turns.decision(place, len(waiting), now_s)))
                policy.given(candidate, one.query)
                candidate = candidate.and_one(one.query, now_s)
            else:
                is_open = False
                made.look_again_s = min(made.look_again_s, ready_s, must_s)
                made.kept[candidate.lane] = made.kept.get(candidate.lane, 0) + 1
    return made


def nobody_before_s(
    policy: KvAware,
    waiting: Sequence[Waiting],
    candidates: Sequence[Candidate],
    now_s: float,
    kept: Mapping[str, int],
    new: int,
    delivery_s: float = 0.0,
) -> float:
    """Until then none of them goes: to find that out takes far less than a plan. `waiting` is never empty.

    `kept`: as the last plan had it, and `new` have come since. Taken for granted is that nobody who was kept for one worker would go to
    another now. Where that is not so, short prompts that could have been sent there together are sent a little later.
    """
    prompts = [(one.query.prompt_length_tokens, one.query.cached_tokens_by_lane) for one in waiting]
    until_s = min(one.since_s for one in waiting) + policy.knobs.hold_s
    for one in candidates:
        least_tokens = min(tokens - cached.get(one.lane, 0) for tokens, cached in prompts)
        shortest_s = one.prefill_base_s + one.prefill_per_token_s * least_tokens
        most_behind = min(len(waiting), kept.get(one.lane, 0) + new) - 1
        until_s = min(until_s, policy.ready_for_s(one, shortest_s, max(0, most_behind), now_s, delivery_s))
    return until_s
