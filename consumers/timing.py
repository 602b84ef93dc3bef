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

    def decode_step_s(self, batch: int, used_fraction: float, context_tokens: float) -> float:
        """One step that gives each of `batch` sequences a token, with this part of the KV cache (0 to 1) in use.

        `context_tokens`: of all sequences of the batch, each read in full though blocks may be shared. No more than quadratic in it
        and `used_fraction` between bends, so that a replay can take many steps at once.
        """
        ...

    def mixed_step_s(self, new_tokens: int, prefix_tokens: int, batch: int, used_fraction: float, context_tokens: float) -> float:
        """One step that does both: the prefill of `new_tokens` after `prefix_tokens`, and a token for each of `batch` sequences."""
        return self.prefill_s(new_tokens, prefix_tokens) + self.decode_step_s(batch, used_fraction, context_tokens)


@dataclass(frozen=True, slots=True)
class ZeroTiming(Timing):
    """Nothing takes time: for tests, where the queue and the transfer are what is looked at."""

    def prefill_s(self, new_tokens: int, context_tokens: int) -> float:
        return 0.0

    def decode_step_s(self, batch: int, used_fraction: float, context_tokens: float = 0.0) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class PolynomialTiming(Timing):
    """Polynomials, highest power first: milliseconds of prefill over new tokens, of a decode step over KV use. Twice the `speed`, half the time."""

    prefill_ms: tuple[float, float, float]
    decode_ms: tuple[float, float, float]
    least_decode_ms: float = 1.0
    speed: float = 1.0

    def prefill_s(self, new_tokens: int, context_tokens: int) -> float:
        return _polynomial(self.prefill_ms, new_tokens) / 1000 / self.speed

    def decode_step_s(self, batch: int, used_fraction: float, context_tokens: float = 0.0) -> float:
        milliseconds = _polynomial(self.decode_ms, min(used_fraction, 1.0))
        return max(milliseconds, self.least_decode_ms) / 1000 / self.speed


@dataclass(frozen=True, slots=True)
class FittedTiming(Timing):
    """Sums of what was measured to cost time, in seconds, none below zero. Prefill: a step, each new token, each pair of a new token and a
    token before it. Decode: a step, each sequence, each token of their contexts.
    """

    prefill_step_s: float
    prefill_token_s: float
    prefill_pair_s: float
    decode_step_base_s: float
    decode_sequence_s: float
    decode_context_token_s: float

    def prefill_s(self, new_tokens: int, context_tokens: int) -> float:
        return self.prefill_step_s + self.prefill_token_s * new_tokens + self.prefill_pair_s * attention_pairs(new_tokens, context_tokens)

    def decode_step_s(self, batch: int, used_fraction: float, context_tokens: float) -> float:
        return self.decode_step_base_s + self.decode_sequence_s * batch + self.decode_context_token_s * context_tokens

    def mixed_step_s(self, new_tokens: int, prefix_tokens: int, batch: int, used_fraction: float, context_tokens: float) -> float:
        """What a step costs for being one is paid once."""
        both_s = self.prefill_s(new_tokens, prefix_tokens) + self.decode_step_s(batch, used_fraction, context_tokens)
        return both_s - min(self.prefill_step_s, self.decode_step_base_s)


@dataclass(frozen=True, slots=True)
class ScaledTiming(Timing):
    """Twice the `speed`, half the time."""

    timing: Timing
    speed: float

    def prefill_s(self, new_tokens: int, context_tokens: int) -> float:
        return self.timing.prefill_s(new_tokens, context_tokens) / self.speed

    def decode_step_s(self, batch: int, used_fraction: float, context_tokens: float) -> float:
        return self.timing.decode_step_s(batch, used_fraction, context_tokens) / self.speed

    def mixed_step_s(self, new_tokens: int, prefix_tokens: int, batch: int, used_fraction: float, context_tokens: float) -> float:
        return self.timing.mixed_step_s(new_tokens, prefix_tokens, batch, used_fraction, context_tokens) / self.speed


def attention_pairs(new_tokens: int, context_tokens: int) -> float:
    """How many (query, key) pairs causal attention computes: each new token sees the context, those before it, and itself."""
    return new_tokens * (context_tokens + (new_tokens + 1) / 2)


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
