"""What the numbers mean: each case is what an operator would conclude from them."""

from dataclasses import replace

import pytest
from pictures import POOL, card, ended, history, known, load, way

from jetwake.deploy.dashboard.history import History
from jetwake.deploy.dashboard.state import Known
from jetwake.deploy.dashboard.verdict import Finding
from jetwake.deploy.dashboard.view import snapshot

PREFILL, DECODE = card("prefill-1", "prefill"), card("decode-1", "decode")
REQUESTS = "jw__requests__ANY__interactive"
HANDOFFS = f"jw__handoff__{POOL}__any"


def found(now: Known, told: History, about: str) -> Finding | None:
    return next((finding for finding in snapshot(now, told).findings if finding.about == about), None)


def many(number: int = 60, **fields: object) -> History:
    return history(*(ended(each, ago_s=1 + each * 0.9, **fields) for each in range(number)))


def test_prefill_is_short() -> None:
    finding = found(known(PREFILL, DECODE, **{REQUESTS: 12}), many(stages=way(queue=900, prefill=600)), "pools")
    assert finding is not None
    assert finding.level == "bad"
    assert finding.text == "Prefill is short: 12 requests wait, those of the last minute waited 1.80 s each; decode has room (0 % in use)."
    assert "make one of a decode worker" in finding.advice


def test_decode_is_short() -> None:
    full = load("decode-1", running_requests=4, used_blocks=95)
    finding = found(known(PREFILL, DECODE, loads=(full,), **{HANDOFFS: 5}), many(stages=way(handoff=1500)), "pools")
    assert finding is not None
    assert finding.level == "bad"
    assert finding.text.startswith("Decode is short: 5 handoffs wait, those of the last minute waited 1.50 s each; prefill has room")


def test_both_are_short() -> None:
    full = load("decode-1", running_requests=4, used_blocks=95)
    busy = known(PREFILL, DECODE, loads=(full,), **{REQUESTS: 12, HANDOFFS: 5})
    finding = found(busy, many(stages=way(queue=900, prefill=600, handoff=1500)), "pools")
    assert finding is not None
    assert finding.text.startswith("Both legs are short")


def test_a_queue_that_nobody_has_come_out_of_yet_is_judged_by_its_length() -> None:
    [first, *_] = snapshot(known(PREFILL, DECODE, **{REQUESTS: 40}), History()).findings
    assert (first.level, first.text) == ("bad", "Prefill is short: 40 requests wait; decode has room (0 % in use).")


def test_waiting_beside_idle_workers_is_no_lack_of_workers() -> None:
    finding = found(known(PREFILL, DECODE), many(stages=way(queue=900, prefill=20)), "pools")
    assert finding is not None
    assert (finding.level, finding.text[:31]) == ("warn", "Slow, but not short of workers:")


def test_both_keep_up() -> None:
    finding = found(known(PREFILL, DECODE), many(stages=way()), "pools")
    assert finding is not None
    assert (finding.level, finding.text) == ("good", "Prefill keeps up: a prompt waits 3.0 ms for its turn, decode has room (0 % in use).")


def test_idle_says_so_and_nothing_else() -> None:
    assert [finding.text for finding in snapshot(known(PREFILL, DECODE), History()).findings] == [
        "Idle: nothing ended in the last minute, and nothing waits."
    ]


@pytest.mark.parametrize(
    ("cached", "predicted", "policy", "level", "begins"),
    [
        (
            800,
            820,
            "kv_aware",
            "good",
            "Routing helps: 80 % of prompt tokens came from caches (82 % expected), the work of 0.8 more workers.",
        ),
        (300, 800, "kv_aware", "warn", "Caches hold less than routers expect: 80 % expected, 30 % found."),
        (800, 300, "kv_aware", "warn", "Caches hold more than routers expect"),
        (10, 10, "kv_aware", "info", "Prompts share next to nothing"),
        (300, 300, "round_robin", "info", "30 % of prompt tokens came from caches, by chance: the policy round_robin"),
    ],
)
def test_whether_routing_helps(cached: int, predicted: int, policy: str, level: str, begins: str) -> None:
    told = many(stages=way(), cached_tokens=cached, predicted_cached_tokens=predicted)
    finding = found(known(PREFILL, DECODE, loads=(load("prefill-1"),), policy=policy), told, "routing")
    assert finding is not None
    assert finding.level == level
    assert finding.text.startswith(begins)


@pytest.mark.parametrize(
    ("transfer", "level", "begins"), [(5, "good", "The network is not the limit"), (800, "bad", "The network is the limit")]
)
def test_whether_the_network_is_the_limit(transfer: float, level: str, begins: str) -> None:
    finding = found(known(PREFILL, DECODE), many(stages=way(transfer=transfer), kv_bytes=4_000_000), "network")
    assert finding is not None
    assert finding.level == level
    assert finding.text.startswith(begins)
    assert "a pull of 4.0 MB takes" in finding.text


@pytest.mark.parametrize(
    ("now", "text"),
    [
        (known(**{REQUESTS: 1}), "No worker is here, and 1 request waits."),
        (known(PREFILL), f"Pool {POOL} has prefill workers and no decode worker: it can serve nothing."),
        (known(PREFILL, card("decode-1", "decode", peers=[])), "decode-1 has shaken hands with no prefill worker."),
        (
            known(PREFILL, card("decode-1", "decode", state="stalled")),
            "decode-1 makes no progress, and is about to give its work to others.",
        ),
        (Known(now_ms=known().now_ms, cards={"a": card("a", "aggregated")}), "No router answers: requests wait."),
        (Known(now_ms=known().now_ms, connected=False), "The broker does not answer: what is shown is what was known before."),
    ],
)
def test_what_is_broken_comes_first(now: Known, text: str) -> None:
    assert snapshot(now, History()).findings[0].text == text


def test_failures_are_told() -> None:
    told = many(stages=way(), outcome="failed")
    assert "60 requests of 60 failed in the last minute." in [finding.text for finding in snapshot(known(PREFILL, DECODE), told).findings]


def test_of_several_models_only_that_one_is_short_whose_requests_wait() -> None:
    cards = (PREFILL, DECODE, card("prefill-2", "prefill", model="n", pool="n-0"), card("decode-2", "decode", model="n", pool="n-0"))
    busy = replace(known(*cards, **{REQUESTS: 12}), by_model={"jw.requests.m.interactive": 12})
    found = [finding.text for finding in snapshot(busy, many(stages=way(queue=900, prefill=600))).findings if finding.about == "pools"]
    assert [text.split(":")[0] for text in found] == [f"Prefill is short in {POOL}"]
