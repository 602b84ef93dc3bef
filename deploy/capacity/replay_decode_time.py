"""How long a run of decode steps takes, without looking at each: nothing changes between them but the growing use of the cache. Pure."""

from dataclasses import dataclass

from ...consumers.timing import Timing

EXACT = 1e-6
"""Relative error from which on a run is taken apart. Polynomials up to the second degree never are, but where they are capped."""


@dataclass(frozen=True, slots=True)
class DecodeRun:
    """`steps` steps of `batch` sequences; step i takes `a + b i + c i^2` seconds."""

    batch: int
    steps: int
    a: float
    b: float
    c: float

    def seconds(self, steps: int) -> float:
        """Of the first `steps` steps."""
        last = steps - 1
        return steps * (self.a + self.b * last / 2 + self.c * last * (2 * last + 1) / 6)

    def steps_until(self, seconds: float) -> int:
        """The fewest steps that take at least so long; at most all."""
        low, high = 0, self.steps
        while low < high:
            middle = (low + high) // 2
            if self.seconds(middle) >= seconds:
                high = middle
            else:
                low = middle + 1
        return low


def decode_run(timing: Timing, batch: int, steps: int, used_tokens: int, context_tokens: int, capacity_tokens: int) -> DecodeRun:
    """Up to `steps` steps from here on, fewer where the timing has a bend. Each step adds a token to every sequence."""

    def step_s(step: int) -> float:
        grown = step * batch
        return timing.decode_step_s(batch, (used_tokens + grown) / capacity_tokens, context_tokens + grown)

    first_s = step_s(0)
    while steps > 2:
        last, middle, test = steps - 1, (steps - 1) // 2, 3 * (steps - 1) // 4
        middle_s, last_s = step_s(middle), step_s(last)
        c = ((last_s - first_s) / last - (middle_s - first_s) / middle) / (last - middle)
        b = (middle_s - first_s) / middle - c * middle
        expected_s = first_s + b * test + c * test * test
        if abs(step_s(test) - expected_s) <= EXACT * expected_s:
            return DecodeRun(batch, steps, first_s, b, c)
        steps //= 2
    return DecodeRun(batch, steps, first_s, step_s(1) - first_s if steps == 2 else 0.0, 0.0)
