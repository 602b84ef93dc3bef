"""When a decode worker takes its own transfers for broken."""

from jetwake.consumers.pull_health import PULLS_IN_A_ROW, PullHealth


def after(lanes: list[str], living: set[str], well_after: int | None = None) -> bool:
    health = PullHealth()
    for count, lane in enumerate(lanes, 1):
        health.failed(lane, living)
        if count == well_after:
            health.went_well()
    return health.broken


def test_a_row_of_failures_from_several_is_this_workers_own_fault() -> None:
    assert after(["a", "b"] * PULLS_IN_A_ROW, {"a", "b"})
    assert not after(["a", "b"] * (PULLS_IN_A_ROW // 2), {"a", "b"})


def test_failures_from_one_of_several_are_that_ones() -> None:
    assert not after(["a"] * 100, {"a", "b"})
    assert after(["a"] * PULLS_IN_A_ROW, {"a"})  # nobody else to compare with: a fresh process is the cheapest try


def test_one_that_goes_well_begins_the_row_anew() -> None:
    assert not after(["a"] * (2 * PULLS_IN_A_ROW - 2), {"a"}, well_after=PULLS_IN_A_ROW - 1)
