"""From what the bus told to what is shown."""

import json
from dataclasses import asdict
from itertools import pairwise

import pytest
from pictures import NOW_MS, POOL, card, ended, history, known, load, way

from jetwake.deploy.dashboard.history import SLOT_S, SLOTS, Gauges, History, place_of
from jetwake.deploy.dashboard.story import bars, of_event
from jetwake.deploy.dashboard.view import snapshot

PAIR = (card("prefill-10", "prefill"), card("prefill-2", "prefill"), card("decode-1", "decode"))


def test_the_parts_of_the_time_to_first_token_add_up_to_it() -> None:
    events = [ended(number, stages=way(queue=20 + number, prefill=100)) for number in range(40)]
    totals = snapshot(known(*PAIR), history(*events)).totals
    assert sum(part.mean_s for part in totals.ttft_stages) == pytest.approx(totals.ttft.mean_s)
    assert [part.stage for part in totals.gap_stages] == ["handoff_wait", "transfer", "first_step"]
    assert totals.itl.mean_s == pytest.approx(0.116 / 10), "10 gaps in the 116 ms after the first token"


def test_an_event_counts_once_and_only_in_its_window() -> None:
    told = history(ended(1, ago_s=10), ended(1, ago_s=10), ended(2, ago_s=200), ended(3, ago_s=200, outcome="failed"))
    assert snapshot(known(*PAIR), told, window_s=60).totals.ended == {"finished": 1}
    assert snapshot(known(*PAIR), told, window_s=300).totals.ended == {"finished": 2, "failed": 1}
    assert [row.id for row in snapshot(known(*PAIR), told).requests] == ["r1", "r2", "r3"]


def test_one_model_alone() -> None:
    other = ended(2).model_copy(update={"model": "other"})
    now = snapshot(known(*PAIR), history(ended(1), other), model="other")
    assert (now.models, now.totals.ended, [row.id for row in now.requests]) == (["m", "other"], {"finished": 1}, ["r2"])


def test_reuse_counts_only_prompts_that_were_prefilled() -> None:
    told = history(
        ended(1, stages=way(), cached_tokens=800, predicted_cached_tokens=900), ended(2, outcome="expired", prompt_tokens=100_000)
    )
    totals = snapshot(known(*PAIR), told).totals
    assert (totals.reuse_real, totals.reuse_predicted) == (0.8, 0.9)


def test_what_is_past_is_forgotten_and_so_is_what_claims_to_be_of_the_future() -> None:
    told = History()
    for ago_s in (-1000, 10, 2 * SLOT_S * SLOTS):
        told.add(ended(int(ago_s), ago_s=ago_s))
    told.sample(NOW_MS, Gauges())
    assert told.over(place_of(NOW_MS) - 3 * SLOTS, place_of(NOW_MS) + SLOTS * 2).requests == 1


def test_workers_come_with_their_queues_in_the_order_people_count() -> None:
    now = snapshot(known(*PAIR, loads=(load("prefill-2", running_requests=3),), **{"jw__prefill__prefill-2-i1": 7}), History())
    [pool] = now.pools
    assert [(worker.worker, worker.waiting, worker.running, worker.told) for worker in pool.prefill] == [
        ("prefill-2", 7, 3, True),
        ("prefill-10", 0, 0, False),
    ]
    assert (pool.pool, [worker.worker for worker in pool.decode]) == (POOL, ["decode-1"])


def test_a_snapshot_is_json_with_everything_from_outside_as_text() -> None:
    hostile = "<img src=x onerror=alert(1)>"
    event = ended(1, stages=way()).model_copy(update={"model": hostile, "error": hostile, "outcome": "failed", "code": hostile})
    text = json.dumps(asdict(snapshot(known(*PAIR), history(event))))
    assert json.loads(text)["requests"][0]["model"] == hostile


def test_lines_have_one_value_for_each_time() -> None:
    now = snapshot(known(*PAIR), history(ended(1, stages=way())), window_s=60)
    lengths = {len(line) for line in asdict(now.lines).values()}
    assert lengths == {60 // SLOT_S}
    assert [count for count in now.lines.requests_per_s if count] == [1 / SLOT_S]


def test_bars_lie_end_to_end() -> None:
    laid = bars(ended(1, stages=way()).times_ms, 1e-3)
    assert [bar.part for bar in laid] == ["first"] * 5 + ["gap"] * 3 + ["answer"]
    for before, after in pairwise(laid):
        assert after.start_s == pytest.approx(before.start_s + before.length_s)


def test_the_story_of_an_event_carries_what_its_submitter_said_and_nothing_it_said_to_the_model() -> None:
    event = ended(1, stages=way()).model_copy(update={"tenant": "acme", "metadata": {"job": "7"}})
    told = of_event(event, None).as_json()
    assert told["labels"] == {"tenant": "acme", "job": "7"}
    assert told["ttft_s"] == pytest.approx(0.054)
    assert not [name for name in told if "token_ids" in name or name in ("tokens", "prompt", "text")]
