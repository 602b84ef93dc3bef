"""Token ids for the requests of a trace: equal content ids give equal tokens, so that caches find what the trace says they share. Pure."""

from dataclasses import dataclass, replace
from math import ceil
from random import Random

from ...schemas.errors import SetupError
from .trace import Trace, TraceRequest


@dataclass(frozen=True)
class LivePrompts:
    """`scale`: lengths of prompts and answers are multiplied by it. `stretch_tokens`: of a stretch as sent. `vocabulary_size`: ids are below it."""

    stretch_tokens: int
    vocabulary_size: int
    scale: float = 1.0
    seed: int = 0

    def scaled(self, trace: Trace) -> Trace:
        """What is sent, as a trace: for a replay of the same."""
        requests = tuple(
            replace(one, input_tokens=self.input_tokens(one), output_tokens=self.output_tokens(one), content=self._content(one))
            for one in trace.requests
        )
        return Trace(trace.name, self.stretch_tokens, requests)

    def input_tokens(self, request: TraceRequest) -> int:
        return max(1, min(round(request.input_tokens * self.scale), len(request.content) * self.stretch_tokens))

    def output_tokens(self, request: TraceRequest) -> int:
        return max(1, round(request.output_tokens * self.scale))

    def prompt(self, request: TraceRequest) -> list[int]:
        tokens = list[int]()
        for content in self._content(request):
            raw = Random(f"{self.seed}/{content}").randbytes(4 * self.stretch_tokens)
            tokens += [value % self.vocabulary_size for value in memoryview(raw).cast("I")]
        return tokens[: self.input_tokens(request)]

    def _content(self, request: TraceRequest) -> tuple[int, ...]:
        """A scaled stretch is whole blocks, and may be a little too long: the last ones may not be needed."""
        return request.content[: -(-self.input_tokens(request) // self.stretch_tokens)]


def live_prompts(
    trace: Trace, vocabulary_size: int, limit_tokens: int, block_size_tokens: int, scale: float = 0.0, seed: int = 0
) -> LivePrompts:
    """`limit_tokens`: what the model takes, prompt and answer together. `scale` 0: 1, or as much as is needed for the longest request to fit.
    Where lengths are scaled, a stretch is rounded up to whole blocks.

    Raises SetupError for a scale with which not all fit, and says which would do.
    """
    longest = max(request.input_tokens + request.output_tokens for request in trace.requests)
    fitting = min(1.0, (limit_tokens - 2) / longest)  # each of the two lengths may be rounded up
    if scale > fitting and scale * longest > limit_tokens:
        raise SetupError(
            f"--scale {scale:g} makes requests of up to {scale * longest:,.0f} tokens, the model takes {limit_tokens:,}: at most --scale {fitting:.4f}"
        )
    if scale < 0:
        raise SetupError(f"--scale must be above 0, not {scale:g}")
    scale = scale or fitting
    stretch_tokens = trace.stretch_tokens if scale == 1 else ceil(trace.stretch_tokens * scale / block_size_tokens) * block_size_tokens
    return LivePrompts(stretch_tokens, vocabulary_size, scale, seed)
