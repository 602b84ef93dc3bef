"""The prefills a worker has in hand: how long until they are through, by what its prefills took so far. Pure; times come in."""

from ..schemas.workers import PrefillTiming
from .prefill_timing import PrefillTimingFit


class PrefillBacklog:
    """Engines work on prompts in the order in which they came, so the oldest is the one being computed."""

    def __init__(self) -> None:
        self._fit = PrefillTimingFit()
        self._jobs: dict[int, int] = {}
        self._next = 0
        self._turn_s = 0.0

    @property
    def new_tokens(self) -> int:
        """Of all in hand, those under way in full."""
        return sum(self._jobs.values())

    def __len__(self) -> int:
        return len(self._jobs)

    def timing(self) -> PrefillTiming | None:
        return self._fit.timing()

    def begin(self, new_tokens: int, now_s: float) -> int:
        """A key for `end`; `new_tokens`: expected to be computed."""
        if not self._jobs:
            self._turn_s = now_s
        self._next += 1
        self._jobs[self._next] = new_tokens
        return self._next

    def end(self, key: int, now_s: float) -> None:
        """Its first token is there, or it ended without."""
        if self._jobs.pop(key, None) is not None:
            self._turn_s = now_s

    def measured(self, computed_tokens: float, started_s: float, now_s: float) -> None:
        """A prefill that began then has computed so many tokens: one more to learn from. Waiting for room is no part of it."""
        self._fit.add(computed_tokens, started_s, now_s)

    def left_s(self, now_s: float) -> float:
        """Until the last of them has its first token; 0 while nothing is known. The one under way may be overdue."""
        timing = self._fit.timing()
        if timing is None or not self._jobs:
            return 0.0
        first_s = timing.seconds(next(iter(self._jobs.values())))
        all_s = len(self._jobs) * timing.base_s + timing.per_token_s * self.new_tokens
        return all_s - first_s + max(0.0, first_s - max(0.0, now_s - self._turn_s))
