"""Counts of durations in buckets, and percentiles of them as Prometheus computes them. Pure.

The buckets are those of the metrics endpoints, so a percentile here is what `histogram_quantile` says of the same requests.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate


class Histogram:
    """`bounds_s`: upper ends of the buckets, rising; a last bucket without an end is added."""

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self.bounds_s = bounds_s
        self.counts = [0] * (len(bounds_s) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds_s, seconds)] += times
        self.sum_s += seconds * times

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def mean_s(self) -> float | None:
        return self.sum_s / self.count if self.count else None

    def quantile_s(self, share: float) -> float | None:
        return quantile_s(self.bounds_s, self.counts, share)


def merged(histograms: Iterable[Histogram], bounds_s: Sequence[float]) -> Histogram:
    whole = Histogram(bounds_s)
    for histogram in histograms:
        whole.counts = [mine + other for mine, other in zip(whole.counts, histogram.counts, strict=True)]
        whole.sum_s += histogram.sum_s
    return whole


def quantile_s(bounds_s: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """Interpolated within its bucket, which begins at 0 for the first one. Beyond the last bound: that bound. None without a count."""
    reached = list(accumulate(counts))
    if not reached or reached[-1] == 0:
        return None
    rank = share * reached[-1]
    place = bisect_left(reached, rank)
    if place >= len(bounds_s):
        return bounds_s[-1]
    start_s = bounds_s[place - 1] if place else 0.0
    before = reached[place - 1] if place else 0
    if counts[place] == 0:
        return start_s
    return start_s + (bounds_s[place] - start_s) * (rank - before) / counts[place]
