"""Fits a timing profile to what was measured: least squares of relative errors, no coefficient below zero. Pure.

Relative errors, because a short prefill that is wrong by half matters as much as a long one. With three coefficients at most, every
set of those that are not zero is tried, and the best one without a negative is taken: exact, and simpler than an iteration.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from ...consumers.timing import attention_pairs
from ...schemas.errors import SetupError
from .profile_file import FitQuality

LEAST_POINTS = 3


@dataclass(frozen=True)
class PrefillPoint:
    new_tokens: int
    context_tokens: int
    seconds: float

    def features(self) -> list[float]:
        return [1.0, self.new_tokens, attention_pairs(self.new_tokens, self.context_tokens)]


@dataclass(frozen=True)
class DecodePoint:
    """`context_tokens`: of all sequences together."""

    batch: int
    context_tokens: float
    seconds: float

    def features(self) -> list[float]:
        return [1.0, self.batch, self.context_tokens]


@dataclass(frozen=True)
class Fit:
    """`coefficients` go with the features of the points; `predicted_s` with the points."""

    coefficients: tuple[float, float, float]
    predicted_s: Sequence[float]
    quality: FitQuality


def fit(points: Sequence[PrefillPoint] | Sequence[DecodePoint]) -> Fit:
    """Raises SetupError for too few points to tell anything by."""
    try:
        import numpy as np
    except ImportError as error:
        raise SetupError("fitting a profile needs numpy: pip install 'jetwake[simulated]'") from error
    if len(points) < LEAST_POINTS:
        raise SetupError(f"a fit needs at least {LEAST_POINTS} measurements, there are {len(points)}")
    features = np.array([point.features() for point in points])
    seconds = np.array([point.seconds for point in points])
    scales = features.max(axis=0)
    weighted = features / scales / seconds[:, None]
    best, best_error = np.zeros(3), float("inf")
    for size in (1, 2, 3):
        for chosen in combinations(range(3), size):
            solved = np.linalg.lstsq(weighted[:, chosen], np.ones(len(points)), rcond=None)[0]
            error = float(((weighted[:, chosen] @ solved - 1) ** 2).sum())
            if (solved >= 0).all() and error < best_error * (1 - 1e-9):
                best, best_error = np.zeros(3), error
                best[list(chosen)] = solved
    base, linear, last = (float(value) for value in best / scales)
    predicted = features @ (best / scales)
    spread = float(((seconds - seconds.mean()) ** 2).sum())
    quality = FitQuality(
        points=len(points),
        r2=round(1 - float(((seconds - predicted) ** 2).sum()) / spread, 4) if spread else 1.0,
        mape=round(float(abs(predicted / seconds - 1).mean()), 4),
    )
    return Fit((base, linear, last), [float(value) for value in predicted], quality)
