"""Where the time of a request went: stages of whole, short, retried and broken-off requests."""

import pytest

from jetwake.schemas.timeline import TTFT_STAGES, Timeline, moments, stages, ttft_s

S = 1_000_000_000
WHOLE = Timeline(
    received_ns=1 * S,
    taken_ns=4 * S,
    routed_ns=5 * S,
    prefill_taken_ns=7 * S,
    prefilled_ns=10 * S,
    first_token_ns=10 * S,
    claimed_ns=14 * S,
    pulled_ns=15 * S,
    second_token_ns=17 * S,
)


def test_a_whole_request_is_the_sum_of_its_stages() -> None:
    at = moments(WHOLE, 2 * S, 20 * S)
    assert stages(at) == pytest.approx(
        {
            "accept": 1,
            "queue": 2,
            "routing": 1,
            "prefill_queue": 2,
            "prefill": 3,
            "handoff_wait": 4,
            "transfer": 1,
            "first_step": 2,
            "generation": 3,
        }
    )
    assert ttft_s(at) == pytest.approx(sum(length for stage, length in stages(at).items() if stage in TTFT_STAGES)) == 9


def test_one_engine_for_both_legs_has_fewer_stages() -> None:
    at = moments(WHOLE.model_copy(update={"claimed_ns": 0, "pulled_ns": 0, "second_token_ns": 0}), 2 * S, 20 * S)
    assert list(stages(at)) == ["accept", "queue", "routing", "prefill_queue", "prefill", "generation"]
    assert stages(at)["generation"] == 10


def test_a_moment_nobody_saw_joins_its_stage_to_the_next() -> None:
    at = moments(WHOLE.model_copy(update={"pulled_ns": 0}), 2 * S, 20 * S)
    assert "transfer" not in stages(at)
    assert stages(at)["first_step"] == 3
    assert sum(stages(at).values()) == 19


def test_the_next_attempt_keeps_what_the_reader_saw_and_counts_what_was_lost() -> None:
    times = WHOLE.anew(18 * S)
    assert times == Timeline(received_ns=1 * S, first_token_ns=10 * S, again_ns=18 * S)
    at = moments(times.model_copy(update={"taken_ns": 19 * S}), 2 * S, 21 * S)
    assert stages(at) == pytest.approx({"accept": 1, "earlier_attempts": 16, "queue": 1, "routing": 2})
    assert ttft_s(at) == 9


@pytest.mark.parametrize(
    ("times", "last"),
    [
        (Timeline(received_ns=1), "queue"),
        (Timeline(received_ns=1, taken_ns=3), "routing"),
        (Timeline(received_ns=1, taken_ns=3, routed_ns=4), "prefill_queue"),
        (Timeline(received_ns=1, prefill_taken_ns=4), "prefill"),
        (Timeline(received_ns=1, prefilled_ns=4, claimed_ns=5), "transfer"),
        (Timeline(received_ns=1, prefilled_ns=4, claimed_ns=5, pulled_ns=6), "first_step"),
    ],
)
def test_a_request_that_ended_early_ends_in_the_stage_it_was_in(times: Timeline, last: str) -> None:
    assert list(stages(moments(times, 2, 9)))[-1] == last


def test_clocks_that_differ_make_no_negative_stage_and_keep_the_sum() -> None:
    at = moments(WHOLE.model_copy(update={"routed_ns": 4 * S - 1000}), 2 * S, 20 * S)
    assert stages(at)["routing"] == 0
    assert sum(stages(at).values()) == pytest.approx(19)


def test_nothing_known_is_nothing_said() -> None:
    assert stages(moments(Timeline(), 0)) == {}
    assert ttft_s(moments(Timeline(), 0)) is None
