"""What came of a replay, or of a live bench: one record for each request, what was seen over time, and the figures of both.

Pure, and free of simulation: whoever fires requests at a real system fills the same records. Times count from the start of the trace.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class RequestRecord:
    """Times of tokens and `end_s` are -1 until they happen; `error` is empty for a request that was answered in full.

    `prefill_worker` and `decode_worker` are the same for an aggregated worker. `transfer_s`: from the wish to move the KV cache to its
    arrival; `handoff_wait_s`: how long it waited for a decode worker with room before that.
    """

    at_s: float
    input_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    predicted_cached_tokens: int = 0
    prefill_worker: str = ""
    decode_worker: str = ""
    first_token_s: float = -1.0
    second_token_s: float = -1.0
    end_s: float = -1.0
    transfer_s: float = 0.0
    handoff_wait_s: float = 0.0
    error: str = ""

    @property
    def completed(self) -> bool:
        return not self.error and self.end_s >= 0

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.at_s

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.at_s

    @property
    def itl_s(self) -> float:
        """Mean time between this request's tokens; 0 for an answer of one."""
        return (self.end_s - self.first_token_s) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


class TokenGaps:
    """The times between tokens of all answers, each with how often it was seen."""

    def __init__(self) -> None:
        self._gaps_s = array("d")
        self._counts = array("q")

    def add(self, gap_s: float, count: int = 1) -> None:
        self._gaps_s.append(gap_s)
        self._counts.append(count)

    @property
    def count(self) -> int:
        return sum(self._counts)

    def weighted(self) -> tuple[Sequence[float], Sequence[int]]:
        """Gaps in seconds, and how often each was seen. In no order; a gap may come several times."""
        return self._gaps_s, self._counts

    def mean(self) -> float:
        count = self.count
        return sum(gap * times for gap, times in zip(self._gaps_s, self._counts, strict=True)) / count if count else 0.0

    def percentile(self, percent: float) -> float:
        left = self.count * percent / 100
        for place in sorted(range(len(self._gaps_s)), key=self._gaps_s.__getitem__):
            left -= self._counts[place]
            if left <= 0:
                return self._gaps_s[place]
        return 0.0


@dataclass
class Series:
    """Samples over time, all lists as long as `at_s`. By pool: requests that wait, requests that run, the part (0 to 1) of the KV blocks
    in use. `prompt_tokens` and `cached_tokens`: of the requests whose prefill began in the interval that ends at the sample. By link:
    the part of the interval in which it was busy.
    """

    at_s: list[float] = field(default_factory=list[float])
    queue_depth: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    running: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    used_kv_fraction: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    prompt_tokens: list[int] = field(default_factory=list[int])
    cached_tokens: list[int] = field(default_factory=list[int])
    link_use: dict[str, list[float]] = field(default_factory=dict[str, list[float]])


@dataclass
class QueueDepth:
    """Of one pool, over the whole time: weighted by time, and the most."""

    mean: float = 0.0
    max: int = 0


@dataclass
class ReplayResult:
    """`configuration`: plain figures and words that tell what was run (those of a replay: `ReplaySettings.described()`); they are
    part of `figures()`. `duration_s`: from the start of the trace to the last answer; `wall_s`: what it took to find out.
    """

    configuration: Mapping[str, Any]
    trace_name: str
    requests: list[RequestRecord]
    series: Series = field(default_factory=Series)
    token_gaps: TokenGaps = field(default_factory=TokenGaps)
    queue_depth: dict[str, QueueDepth] = field(default_factory=dict[str, QueueDepth])
    preemptions: int = 0
    duration_s: float = 0.0
    wall_s: float = 0.0

    def figures(self) -> dict[str, Any]:
        """The object that `--json` prints. Latencies are of the requests that completed, the hit rate of all that got a prefill."""
        completed = [record for record in self.requests if record.completed]
        began = [record for record in self.requests if record.first_token_s >= 0]
        prompt_tokens = sum(record.input_tokens for record in began)
        return {
            "trace": self.trace_name,
            **self.configuration,
            "requests": len(self.requests),
            "completed": len(completed),
            "failed": len(self.requests) - len(completed),
            "hit_rate": round(sum(record.cached_tokens for record in began) / prompt_tokens, 4) if prompt_tokens else 0.0,
            "ttft_ms": summary_ms(record.ttft_s for record in completed),
            "itl_ms": {
                "mean": _ms(self.token_gaps.mean()),
                "p50": _ms(self.token_gaps.percentile(50)),
                "p99": _ms(self.token_gaps.percentile(99)),
            },
            "e2e_ms": summary_ms(record.e2e_s for record in completed),
            "transfer_ms": summary_ms(record.transfer_s for record in completed if record.prefill_worker != record.decode_worker),
            "queue_depth": {pool: {"mean": round(depth.mean, 3), "max": depth.max} for pool, depth in self.queue_depth.items()},
            "preemptions": self.preemptions,
            "duration_s": round(self.duration_s, 3),
            "wall_s": round(self.wall_s, 3),
        }


def summary_ms(seconds: Iterable[float]) -> dict[str, float]:
    """Mean and percentiles in milliseconds; zeros when there is nothing."""
    ordered = sorted(seconds)
    if not ordered:
        return {"mean": 0.0, "p50": 0.0, "p99": 0.0}
    return {
        "mean": _ms(sum(ordered) / len(ordered)),
        "p50": _ms(ordered[int(0.50 * (len(ordered) - 1))]),
        "p99": _ms(ordered[int(0.99 * (len(ordered) - 1))]),
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
