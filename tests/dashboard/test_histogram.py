"""Percentiles as Prometheus computes them; the expected values are those of `histogram_quantile` on the same buckets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetwake.deploy.dashboard.histogram import Histogram, merged, quantile_s

BOUNDS_S = (0.1, 0.5, 1.0, 5.0)


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ([0, 0, 0, 0, 0], 0.5, None),
        ([10, 0, 0, 0, 0], 0.5, 0.05),  # the first bucket begins at 0
        ([0, 10, 0, 0, 0], 0.5, 0.3),
        ([5, 5, 0, 0, 0], 0.5, 0.1),
        ([1, 2, 4, 2, 1], 0.9, 5.0),
        ([1, 2, 4, 2, 1], 0.5, 0.75),
        ([0, 0, 0, 0, 3], 0.5, 5.0),  # what is beyond the last bound is told as that bound
        ([9, 0, 0, 0, 1], 0.99, 5.0),
    ],
)
def test_a_quantile_is_that_of_prometheus(counts: list[int], share: float, expected: float | None) -> None:
    assert quantile_s(BOUNDS_S, counts, share) == (None if expected is None else pytest.approx(expected))


def test_a_bound_belongs_to_its_bucket() -> None:
    one = Histogram(BOUNDS_S)
    one.observe(0.5)
    assert one.counts == [0, 1, 0, 0, 0]


@given(st.lists(st.floats(min_value=0.0, max_value=9.0), min_size=1, max_size=60), st.floats(min_value=0.01, max_value=1.0))
def test_a_quantile_lies_in_the_bucket_of_the_value_it_stands_for(values: list[float], share: float) -> None:
    halves = [Histogram(BOUNDS_S), Histogram(BOUNDS_S)]
    for place, value in enumerate(values):
        halves[place % 2].observe(value)
    whole = merged(halves, BOUNDS_S)
    assert whole.count == len(values)
    found = whole.quantile_s(share)
    rank = share * len(values)
    exact = next(value for number, value in enumerate(sorted(values), 1) if number >= rank)
    ends = [0.0, *BOUNDS_S]
    low = max(end for end in ends if end < exact or end == 0.0)
    high = min([end for end in BOUNDS_S if end >= exact], default=BOUNDS_S[-1])
    assert found is not None
    assert min(low, BOUNDS_S[-1]) - 1e-9 <= found <= high + 1e-9
