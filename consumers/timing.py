"""How long a step of a simulated engine takes: pure figures, used by the engine in real time and by replay on a virtual clock.

`DYNAMO_DEFAULT` is the engine model of NVIDIA Dynamo 1.6.1's mock engine and offline replay (https://github.com/ai-dynamo/dynamo,
Apache-2.0), so that figures can be laid beside theirs.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ..schemas.errors import SetupError


@runtime_checkable
class Timing(Protocol):
    """Pure: the same arguments give the same seconds."""

    def prefill_s(self, new_tokens: int, context_tokens: int) -> float:
        """One prefill step that computes `new_tokens` after `context_tokens` cached ones."""
        ...

    def decode_step_s(self, batch: int, used_fraction: float) -> float:
        """One step that gives each of `batch` sequences a token, with this part of the KV cache (0 to 1) in use."""
        ...


@dataclass(frozen=True, slots=True)
class ZeroTiming:
    """Nothing takes time: for tests, where the queue and the transfer are what is looked at."""

    def prefill_s(self, new_tokens: int, context_tokens: int) -> float:
        return 0.0

    def decode_step_s(self, batch: int, used_fraction: float) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class PolynomialTiming:
    """Polynomials, highest power first: milliseconds of prefill over new tokens, of a decode step over KV use. Twice the `speed`, half the time."""

    prefill_ms: tuple[float, float, float]
    decode_ms: tuple[float, float, float]
    least_decode_ms: float = 1.0
    speed: float = 1.0

    def prefill_s(self, new_tokens: int, context_tokens: int) -> float:
        return _polynomial(self.prefill_ms, new_tokens) / 1000 / self.speed

    def decode_step_s(self, batch: int, used_fraction: float) -> float:
        milliseconds = _polynomial(self.decode_ms, min(used_fraction, 1.0))
        return max(milliseconds, self.least_decode_ms) / 1000 / self.speed


ZERO = ZeroTiming()
DYNAMO_DEFAULT = PolynomialTiming(prefill_ms=(4.209989e-07, 1.518344e-02, 16.50142), decode_ms=(-25.74, 54.01, 5.74))

TIMING_NAMES = ("zero", "dynamo-default")


def timing_named(name: str, speed: float = 1.0) -> Timing:
    """Raises SetupError for a name not in `TIMING_NAMES`, or a speed that is not above zero."""
    if speed <= 0:
        raise SetupError(f"timing speed must be above 0, not {speed}")
    if name == "zero":
        return ZERO
    if name == "dynamo-default":
        return PolynomialTiming(DYNAMO_DEFAULT.prefill_ms, DYNAMO_DEFAULT.decode_ms, speed=speed)
    raise SetupError(f"no timing is called {name!r}; there are: {', '.join(TIMING_NAMES)}")


def _polynomial(coefficients: tuple[float, float, float], x: float) -> float:
    square, linear, constant = coefficients
    return (square * x + linear) * x + constant
