"""The table of house rules: how a handler ended, and what becomes of the message."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetwake.pipeline.backoff import backoff_s
from jetwake.pipeline.settle import Settlement, settlement
from jetwake.schemas import errors
from jetwake.schemas.errors import (
    BrokerUnavailable,
    DeadlineExceeded,
    EngineDead,
    EngineRefused,
    HandoffRefused,
    InvalidRequest,
    NoWorker,
    Overloaded,
    PullFailed,
    RequestCancelled,
    StreamFull,
    StreamMissing,
    WorkerLeaving,
)


@pytest.mark.parametrize(
    ("error", "deliveries", "kind", "tell_client", "dead_letter"),
    [
        (None, 1, "ack", False, False),
        (RequestCancelled("x"), 1, "ack", False, False),
        (DeadlineExceeded("x"), 9, "ack", False, False),
        (asyncio.CancelledError(), 9, "nak", False, False),
        (NoWorker("x"), 99, "nak", False, False),
        (Overloaded("x"), 99, "nak", False, False),
        (StreamFull("x"), 99, "nak", False, False),
        (StreamMissing("x"), 99, "nak", False, False),
        (BrokerUnavailable("x"), 99, "nak", False, False),
        (PullFailed("x"), 2, "nak", False, False),
        (PullFailed("x"), 3, "term", True, True),
        (HandoffRefused("x"), 4, "term", True, True),
        (EngineRefused("x"), 1, "term", True, False),
        (InvalidRequest("x"), 1, "term", True, False),
        (KeyError("x"), 1, "nak", False, False),
        (KeyError("x"), 3, "term", True, True),
    ],
)
def test_the_table(error: BaseException | None, deliveries: int, kind: str, tell_client: bool, dead_letter: bool) -> None:
    verdict = settlement(error, deliveries, 3)
    assert (verdict.kind, verdict.tell_client, verdict.dead_letter) == (kind, tell_client, dead_letter)


@pytest.mark.parametrize("error", [PullFailed("x"), EngineDead("x"), WorkerLeaving("x"), KeyError("x")])
def test_what_can_be_moved_is_not_tried_again_here(error: Exception) -> None:
    assert settlement(error, 1, 3, can_move=True) == Settlement("ack", move=True)
    assert settlement(error, 9, 3, can_move=True) == Settlement("ack", move=True)


@pytest.mark.parametrize("error", [None, RequestCancelled("x"), NoWorker("x"), BrokerUnavailable("x"), EngineRefused("x")])
def test_what_moving_does_not_help_is_settled_as_ever(error: Exception | None) -> None:
    assert settlement(error, 1, 3, can_move=True) == settlement(error, 1, 3)


def test_shutting_down_hands_back_at_once() -> None:
    assert settlement(asyncio.CancelledError(), 1, 3) == Settlement("nak", delay_s=0.0)


def test_overloaded_says_when() -> None:
    assert settlement(Overloaded("x", retry_after_s=7.0), 1, 3).delay_s == 7.0


@given(st.integers(min_value=-5, max_value=10**9))
def test_backoff_stays_between_first_and_cap(failures: int) -> None:
    assert 0.05 <= backoff_s(failures) <= 5.0


def test_every_error_of_the_tree_settles_without_losing_the_client() -> None:
    """Whatever ends in `term` tells the client, except what the client ended itself."""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.JetwakeError)]
    for kind in kinds:
        error = kind.__new__(kind)
        error.__dict__["retry_after_s"] = 1.0
        for deliveries in (1, 3, 99):
            verdict = settlement(error, deliveries, 3)
            assert verdict.tell_client == (verdict.kind == "term")
