"""Which requests the router sends, which it keeps, and in what order; and what a worker tells of its prefills."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, product

import pytest

from jetwake.consumers.prefill_backlog import PrefillBacklog
from jetwake.producers.assignment import Waiting, assign
from jetwake.producers.delivery_time import MOST_S, DeliveryTime
from jetwake.producers.fleet import Candidate
from jetwake.producers.holding import Plan, nobody_before_s, plan
from jetwake.producers.policies import BEGINS, KvAware, KvAwareKnobs, Query
from jetwake.schemas.workers import PrefillTiming

TIMING = PrefillTiming(base_s=0.02, per_token_s=0.001)
NOW_S = 100.0


def worker(lane: str, left_s: float = 0.0, prefills: int = 0, queued: int = 0) -> Candidate:
    return Candidate(
        lane, lane, "prefill", queued, prefills, 0, 64,
        prefill_left_s=left_s, told_s=NOW_S, running_prefills=prefills, capacity_blocks=1000, free_blocks=1000, timing=TIMING,
    )  # fmt: skip


def waits(name: str, tokens: int, since_s: float = NOW_S, **blocks: int) -> Waiting:
    return Waiting(Query(name, tokens, 16, blocks), since_s)


def plan_of(waiting: list[Waiting], workers: list[Candidate], now_s: float = NOW_S, **knobs: float) -> Plan:
    return plan(KvAware(knobs=KvAwareKnobs(**{"lead": 1.0, **knobs})), waiting, workers, now_s)  # type: ignore[arg-type]


def sent(made: Plan) -> list[tuple[str, str]]:
    return [(one.query.request_id, decision.lane) for one, decision in made.sends]


def test_free_workers_get_one_each_and_the_rest_waits_until_one_is_almost_free() -> None:
    made = plan_of([waits(name, 500) for name in "abc"], [worker("x"), worker("y")])
    assert sorted(lane for _, lane in sent(made)) == ["x", "y"]
    assert made.look_again_s == pytest.approx(NOW_S + 0.52 - 0.02)


def test_the_next_is_sent_a_little_before_the_last_prefill_ends_but_no_third() -> None:
    assert sent(plan_of([waits("a", 500)], [worker("x", left_s=0.015, prefills=1)])) == [("a", "x")]
    made = plan_of([waits("a", 500)], [worker("x", left_s=0.025, prefills=1)])
    assert (sent(made), made.look_again_s) == ([], pytest.approx(NOW_S + 0.005))
    made = plan_of([waits("a", 500)], [worker("x", left_s=0.015, prefills=2)])
    assert (sent(made), made.look_again_s) == ([], pytest.approx(NOW_S + 0.015))


def test_what_a_worker_will_have_done_when_the_job_is_there_is_no_reason_to_wait() -> None:
    policy, busy = KvAware(knobs=KvAwareKnobs(lead=0.0)), [worker("x", left_s=0.05, prefills=3)]
    assert sent(plan(policy, [waits("a", 500)], busy, NOW_S, delivery_s=0.05)) == [("a", "x")]
    made = plan(policy, [waits("a", 500)], busy, NOW_S, delivery_s=0.03)
    assert (sent(made), made.look_again_s) == ([], pytest.approx(NOW_S + 0.02))
    assert nobody_before_s(policy, [waits("a", 500)], busy, NOW_S, made.kept, 0, delivery_s=0.03) == made.look_again_s


def test_prefills_shorter_than_their_way_go_together_as_many_as_are_computed_on_the_way() -> None:
    """Three milliseconds each, and ten until they are there: the fifth would find a worker that is not free yet."""
    quick = replace(worker("x", prefills=2), timing=PrefillTiming(base_s=0.0001, per_token_s=0.00001))
    policy, waiting = KvAware(), [waits(f"r{n}", 300) for n in range(8)]
    assert len(sent(plan(policy, waiting, [quick], NOW_S))) == 1
    assert len(sent(plan(policy, waiting, [quick], NOW_S, delivery_s=0.01))) == 4


def test_a_delivery_takes_as_long_as_those_before_it_did_but_a_broker_that_was_away_does_not_count() -> None:
    delivery = DeliveryTime()
    for _ in range(100):
        delivery.measured(0.004)
    assert delivery.seconds == pytest.approx(0.004, rel=0.01)
    for _ in range(100):
        delivery.measured(30.0)
    assert delivery.seconds <= MOST_S


def test_what_the_worker_told_grows_old() -> None:
    assert sent(plan_of([waits("a", 500, since_s=NOW_S + 0.4)], [worker("x", left_s=0.5, prefills=1)], NOW_S + 0.4)) == []
    assert sent(plan_of([waits("a", 500, since_s=NOW_S + 0.5)], [worker("x", left_s=0.5, prefills=1)], NOW_S + 0.5)) == [("a", "x")]


def test_nobody_is_kept_for_longer_than_the_knob_says() -> None:
    busy = [worker("x", left_s=50.0, prefills=1)]
    made = plan_of([waits("a", 500)], busy)
    assert (sent(made), made.look_again_s) == ([], NOW_S + 2.0)
    assert sent(plan_of([waits("a", 500, since_s=NOW_S - 2.0)], busy)) == [("a", "x")]
    assert sent(plan_of([waits("a", 500)], busy, hold_s=0.0)) == [("a", "x")]


def test_it_waits_for_the_cache_only_where_that_is_sooner() -> None:
    """800 of 1000 tokens are cached on x, which is busy: for 0.5 s that is worth it, for 1 s it is not."""
    assert sent(plan_of([waits("a", 1000, x=50)], [worker("x", left_s=0.5, prefills=1), worker("y")])) == []
    assert sent(plan_of([waits("a", 1000, x=50)], [worker("x", left_s=1.0, prefills=1), worker("y")])) == [("a", "y")]


def test_who_loses_most_gets_its_worker_whoever_came_first() -> None:
    """Both workers are free. The one that came first would be as well off on either."""
    for lane, other in ("xy", "yx"):
        made = plan(KvAware(), [waits("cold", 1000), waits("warm", 1000, **{lane: 50})], [worker("x"), worker("y")], NOW_S)
        assert sorted(sent(made)) == [("cold", other), ("warm", lane)]


def test_the_shortest_goes_first_less_what_it_has_waited() -> None:
    few = [waits("long", 900), waits("short", 200)]
    assert sent(plan_of(few, [worker("x")])) == [("short", "x")]
    assert sent(plan_of([*few, waits("old", 900, since_s=NOW_S - 1.0)], [worker("x")])) == [("old", "x")]


def test_long_prompts_do_not_meet_on_one_worker() -> None:
    made = plan_of([waits(name, tokens) for name, tokens in (("a", 200), ("b", 210), ("c", 900), ("d", 910))], [worker("x"), worker("y")])
    assert sorted(name for name, _ in sent(made)) == ["a", "b"]
    assert {lane for _, lane in sent(made)} == {"x", "y"}
    turns = assign(
        KvAware(), [waits(name, tokens) for name, tokens in (("a", 200), ("c", 900), ("d", 910))], [worker("x"), worker("y")], NOW_S
    )
    assert sorted(turn.order[-1].query.request_id for turn in turns) == ["c", "d"]


@pytest.mark.parametrize("seed", range(40))
def test_workers_that_are_alike_and_free_give_the_least_sum_of_waiting_there_is(seed: int) -> None:
    dice = random.Random(seed)
    workers = [worker(lane) for lane in "xyz"[: dice.choice((2, 3))]]
    waiting = [waits(f"r{number}", int(10 ** dice.uniform(1.5, 3.3))) for number in range(dice.randint(2, 6))]
    prefills_s = [workers[0].prefill_s(one.query) for one in waiting]

    def total_s(lanes: Sequence[Sequence[float]]) -> float:
        return sum(sum(accumulate(sorted(lane))) for lane in lanes)

    made = assign(KvAware(seed), waiting, workers, NOW_S)
    got = total_s([[turns.candidate.prefill_s(one.query) for one in turns.order] for turns in made])
    every = product(range(len(workers)), repeat=len(waiting))
    least = min(
        total_s([[p for p, lane in zip(prefills_s, lanes, strict=True) if lane == place] for place in range(len(workers))])
        for lanes in every
    )
    assert sum(len(turns.order) for turns in made) == len(waiting)
    assert got == pytest.approx(least)


def test_a_job_is_not_sent_beside_one_that_has_not_begun() -> None:
    """The prefill there takes 25 ms and was sent just now: sent at once, the next would be computed in the same step."""
    busy = replace(worker("x", left_s=0.025, prefills=1), sent_s=NOW_S)
    made = plan_of([waits("a", 500)], [busy], lead=2.0)
    assert (sent(made), made.look_again_s) == ([], pytest.approx(NOW_S + BEGINS * 0.02))
    assert sent(plan_of([waits("a", 500)], [replace(busy, sent_s=NOW_S - 0.02)], lead=2.0)) == [("a", "x")]
    assert sent(plan_of([waits("a", 10), waits("b", 500)], [worker("x")], lead=2.0)) == [("a", "x")]


def test_short_prompts_are_sent_together_when_many_wait() -> None:
    """30 ms each, of which 20 are the step's own: each that goes along spares the others those."""
    assert len(sent(plan_of([waits(f"r{n}", 10) for n in range(2)], [worker("x")], lead=0.0))) == 1
    assert len(sent(plan_of([waits(f"r{n}", 10) for n in range(12)], [worker("x")], lead=0.0))) > 4
    assert len(sent(plan_of([waits(f"r{n}", 900) for n in range(12)], [worker("x")]))) == 1


def test_workers_that_failed_a_request_get_it_only_when_there_is_no_other() -> None:
    again = Waiting(Query("a", 500, 16, {"x": 31}), NOW_S, ["x"])
    assert sent(plan_of([again], [worker("x"), worker("y")])) == [("a", "y")]
    assert sent(plan_of([again], [worker("x")])) == [("a", "x")]


@pytest.mark.parametrize("seed", range(100))
def test_the_quick_look_before_a_plan_never_says_later_than_the_plan_itself(seed: int) -> None:
    """Whatever waits where: by the time that somebody should go, a plan is made. What has come since the last plan may go anywhere."""
    dice = random.Random(seed)
    workers = [worker(lane, left_s=dice.uniform(0.0, 3.0), prefills=dice.randint(0, 2)) for lane in "xyz"[: dice.randint(1, 3)]]
    waiting = [
        waits(f"r{number}", int(10 ** dice.uniform(0.5, 3.3)), NOW_S - dice.uniform(0.0, 1.0), **{dice.choice("xyz"): dice.randint(0, 30)})
        for number in range(dice.randint(2, 12))
    ]
    policy, known = KvAware(), waiting[: dice.randint(1, len(waiting))]
    first = plan(policy, known, workers, NOW_S)
    gone = [one for one, _ in first.sends]
    known, workers = [one for one in known if one not in gone], [with_sent(first, one) for one in workers]
    new = [one for one in waiting if one not in known and one not in gone]
    if known or new:
        exact = plan(policy, [*known, *new], workers, NOW_S)
        assert sum(first.kept.values()) == len(known)
        moved = any(exact_there > first.kept.get(lane, 0) + len(new) for lane, exact_there in placed(exact).items())
        quick_s = nobody_before_s(policy, [*known, *new], workers, NOW_S, first.kept, len(new))
        assert moved or quick_s <= (NOW_S if exact.sends else exact.look_again_s)


def with_sent(made: Plan, candidate: Candidate) -> Candidate:
    for one, decision in made.sends:
        if decision.lane == candidate.lane:
            candidate = candidate.and_one(one.query, NOW_S)
    return candidate


def placed(made: Plan) -> dict[str, int]:
    lanes = [*(decision.lane for _, decision in made.sends), *(lane for lane, count in made.kept.items() for _ in range(count))]
    return {lane: lanes.count(lane) for lane in lanes}


def test_the_quick_look_spares_a_plan_while_nobody_can_go() -> None:
    """Two workers busy for a second, and eight prompts for each: too long to go together as long as there are not fifteen of them."""
    waiting, busy = [waits(f"r{number}", 250) for number in range(16)], [worker(lane, left_s=1.0, prefills=2) for lane in "xy"]
    made = plan_of(waiting, busy)
    assert (sent(made), made.kept) == ([], {"x": 8, "y": 8})
    quick_s = nobody_before_s(KvAware(knobs=KvAwareKnobs(lead=1.0)), waiting, busy, NOW_S, made.kept, 0)
    assert quick_s == made.look_again_s == pytest.approx(NOW_S + 1.0)


def test_nobody_waiting_is_no_plan() -> None:
    assert plan_of([], [worker("x")]) == Plan([], math.inf)


def test_a_backlog_is_unknown_until_there_is_something_to_go_by() -> None:
    backlog = PrefillBacklog()
    for number in range(3):
        assert backlog.left_s(10.0 * number) == 0.0
        key = backlog.begin(100 + number, 10.0 * number)
        backlog.measured(100 + number, 10.0 * number, 10.0 * number + 0.02 + 0.001 * (100 + number))
        backlog.end(key, 10.0 * number + 1)
    assert backlog.timing() is not None
    assert backlog.left_s(100.0) == 0.0


def test_a_backlog_counts_down_the_first_and_all_of_those_behind_it() -> None:
    backlog = PrefillBacklog()
    for number in range(4):
        backlog.measured(100 * number + 100, 10.0 * number, 10.0 * number + 0.12 + 0.1 * number)
    first, second = backlog.begin(480, 100.0), backlog.begin(80, 100.1)
    assert (len(backlog), backlog.new_tokens) == (2, 560)
    assert backlog.left_s(100.2) == pytest.approx(0.3 + 0.1)
    assert backlog.left_s(101.0) == pytest.approx(0.1)  # overdue
    backlog.end(first, 101.0)
    assert backlog.left_s(101.02) == pytest.approx(0.08)
    backlog.end(first, 102.0)
    backlog.end(second, 101.1)
    assert (len(backlog), backlog.left_s(101.1)) == (0, 0.0)
