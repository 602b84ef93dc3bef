"""The accounts of a chaos run: each thing that must not be is seen, and nothing else is."""

from dataclasses import replace
from typing import Any

import pytest

from jetwake.deploy.chaos.ledger import Aftermath, Record, account, token_fault
from jetwake.schemas.replies import AnyTerminal, Cancelled, Expired, Failed, Finished
from jetwake.schemas.tokens import pack_tokens

EXPECTED = [11, 22, 33, 44, 55, 66]
SECOND_NS = 1_000_000_000
END_NS = 100 * SECOND_NS


def record(**changes: Any) -> Record:
    whole = Record(
        request_id="r", client="c", sent_after_s=0.0, prompt_tokens=3, wish="answer", expected=EXPECTED, submission="accepted",
        deadline_ns=400 * SECOND_NS, tokens=list(EXPECTED), outcome="finished",
    )  # fmt: skip
    return replace(whole, **changes)


def finished(tokens: list[int] | None = None) -> AnyTerminal:
    return Finished(
        request_id="r", attempt=1, tokens=pack_tokens(EXPECTED if tokens is None else tokens), finish_reason="length", ended_ns=END_NS
    )


def cancelled() -> AnyTerminal:
    return Cancelled(request_id="r", attempt=1, ended_ns=END_NS)


def expired() -> AnyTerminal:
    return Expired(request_id="r", attempt=1, ended_ns=END_NS)


def failed() -> AnyTerminal:
    return Failed(request_id="r", attempt=3, code="engine_dead", text="three times", ended_ns=END_NS)


@pytest.mark.parametrize(
    ("one", "end"),
    [
        (record(), finished()),
        (record(wish="cancel", has_cancelled=True, outcome="cancelled", tokens=EXPECTED[:2]), cancelled()),
        (record(wish="cancel", has_cancelled=True), finished()),
        (record(wish="leave", has_cancelled=True, outcome="left", tokens=EXPECTED[:1]), cancelled()),
        (record(wish="deadline", deadline_ns=END_NS, outcome="expired", tokens=[]), expired()),
        (record(wish="deadline", deadline_ns=END_NS, outcome="expired", tokens=[]), finished()),
        (record(outcome="failed", tokens=EXPECTED[:3]), failed()),
        (record(submission="unknown", outcome="", tokens=[]), finished()),
    ],
)
def test_what_is_as_it_should_be(one: Record, end: AnyTerminal) -> None:
    ledger = account([one], {"r": end}, {"r": 1})
    assert ledger.is_clean, ledger.violations
    assert ledger.is_balanced
    assert ledger.accepted == 1


@pytest.mark.parametrize(
    ("one", "end", "count", "kinds"),
    [
        (record(outcome=""), None, 0, ["lost"]),
        (record(), finished(), 2, ["duplicate"]),
        (record(outcome=""), finished(), 1, ["unheard"]),
        (record(outcome="failed"), finished(), 1, ["disagreement"]),
        (record(outcome="expired"), finished(), 1, ["disagreement"]),
        (record(outcome="cancelled", tokens=[]), cancelled(), 1, ["unasked"]),
        (record(outcome="expired", tokens=[]), expired(), 1, ["unasked"]),
        (record(tokens=[11, 33, 44, 55, 66]), finished(), 1, ["gap"]),
        (record(tokens=[11, 22, 11, 22, 33]), finished(), 1, ["duplicate"]),
        (record(tokens=[11, 22, 99, 44, 55, 66]), finished(), 1, ["foreign"]),
        (record(tokens=EXPECTED[:4]), finished(), 1, ["gap"]),
        (record(), finished(EXPECTED[:5]), 1, ["gap"]),
        (record(), finished([*EXPECTED, 77]), 1, ["foreign"]),
        (record(wire_faults=[("foreign", "on the wire")]), finished(), 1, ["foreign"]),
    ],
)
def test_each_violation_is_seen(one: Record, end: AnyTerminal | None, count: int, kinds: list[str]) -> None:
    ledger = account([one], {} if end is None else {"r": end}, {"r": count})
    assert [violation.kind for violation in ledger.violations] == kinds
    assert not ledger.is_clean


def test_the_balance() -> None:
    records = [record(request_id=name, submission=submission) for name, submission in
               (("a", "accepted"), ("b", "accepted"), ("c", "refused"), ("d", "unknown"))]  # fmt: skip
    ledger = account(records, {"a": finished()}, {"a": 1})
    assert (ledger.accepted, ledger.finished, ledger.open, ledger.refused, ledger.unknown) == (2, 1, 1, 1, 1)
    assert not ledger.is_balanced
    assert "2 accepted != 1 finished" in ledger.line()


@pytest.mark.parametrize("aftermath", [Aftermath(blocks_held=3), Aftermath(orphans=["77 python"]), Aftermath(leftovers=["a consumer"])])
def test_what_is_left_behind_is_a_violation_too(aftermath: Aftermath) -> None:
    assert not account([record()], {"r": finished()}, {"r": 1}, aftermath).is_clean


def test_tokens_from_an_offset_on() -> None:
    assert token_fault(EXPECTED[2:4], EXPECTED, offset=2) is None
    assert token_fault([], EXPECTED, offset=3) is None
    assert token_fault(EXPECTED[2:4], EXPECTED, offset=1) is not None
