"""What a prefill really takes here, learned from the jobs as they end: a line through (new tokens, seconds).

Routers read it from the load reports and expect the time to first token with it. Pure. Recent jobs weigh most, so a worker that
slows down (another process on its cores, a longer context) is believed within some dozen jobs.
"""

from ..schemas.workers import PrefillTiming

FORGETTING = 0.98
"""Weight of a job when the next one has come: about the last fifty count."""
LEAST_JOBS = 3


class PrefillTimingFit:
    """Weighted least squares of `seconds = base + per_token * new_tokens`, with neither below zero."""

    def __init__(self) -> None:
        self._jobs = 0
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._last_end_s = 0.0

    def add(self, new_tokens: float, started_s: float, ended_s: float) -> None:
        """One job. While several run at once each waits for the others: its own time begins when the one before it ended."""
        seconds = ended_s - max(started_s, self._last_end_s)
        self._last_end_s = max(self._last_end_s, ended_s)
        x, y = new_tokens, max(0.0, seconds)
        self._weight = FORGETTING * self._weight + 1.0
        self._x = FORGETTING * self._x + x
        self._y = FORGETTING * self._y + y
        self._xx = FORGETTING * self._xx + x * x
        self._xy = FORGETTING * self._xy + x * y
        self._jobs += 1

    def timing(self) -> PrefillTiming | None:
        """None until there is something to go by."""
        if self._jobs < LEAST_JOBS:
            return None
        spread = self._weight * self._xx - self._x * self._x
        slope = (self._weight * self._xy - self._x * self._y) / spread if spread > 1e-9 * self._weight * self._xx else 0.0
        base = (self._y - slope * self._x) / self._weight
        if slope <= 0.0:  # all jobs alike, or noise: the mean is all that is known
            return PrefillTiming(base_s=0.0, per_token_s=self._y / self._x) if self._x else None
        if base < 0.0:
            return PrefillTiming(base_s=0.0, per_token_s=self._xy / self._xx)
        return PrefillTiming(base_s=base, per_token_s=slope)
