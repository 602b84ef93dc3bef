"""What a trace is like: how many requests come, how long they are, and how much of them a prefix cache could save. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, pstdev

from ...schemas.errors import SetupError
from .prefix_reuse import PrefixReuse, SharedPrefix
from .trace import Trace

TOP_PREFIXES = 10
MINUTE_S = 60


@dataclass(frozen=True, slots=True)
class Spread:
    mean: float
    least: float
    p10: float
    p50: float
    p90: float
    p99: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        ordered = sorted(values)
        p10, p50, p90, p99 = (ordered[round(percent / 100 * (len(ordered) - 1))] for percent in (10, 50, 90, 99))
        return cls(round(fmean(ordered), 3), ordered[0], p10, p50, p90, p99, ordered[-1])


@dataclass(frozen=True, slots=True)
class CacheSize:
    """`reuse`: the part of all prompt tokens that one LRU cache of so many blocks would have had."""

    blocks: int
    reuse: float


@dataclass(frozen=True)
class TraceStats:
    """`gap_cv`: the spread of the gaps between arrivals over their mean: 1 for a Poisson process, above it for bursts; None when all
    come at once. `ideal_reuse`: by an endless cache. `sharing_requests`: the part of the requests of which it would have had something,
    and `shared_tokens`: how much, for these. `sessions`, `turns`: None where the trace knows no sessions.
    """

    name: str
    block_size_tokens: int
    requests: int
    duration_s: float
    rate_per_s: float | None
    peak_per_minute: int
    gap_cv: float | None
    input_tokens: Spread
    output_tokens: Spread
    distinct_blocks: int
    ideal_reuse: float
    pooled_reuse: tuple[CacheSize, ...]
    sharing_requests: float
    shared_tokens: Spread | None
    top_prefixes: tuple[SharedPrefix, ...]
    sessions: int | None
    turns: Spread | None
    notes: tuple[str, ...]


def trace_stats(trace: Trace, reuse: PrefixReuse, cache_blocks: Sequence[int] = ()) -> TraceStats:
    """`reuse` is that of this trace. Without `cache_blocks`, sizes from a few to all blocks. Raises SetupError when there are no requests."""
    if not trace.requests:
        raise SetupError(f"{trace.name} has no requests")
    times_s = [request.at_s for request in trace.requests]
    duration_s = times_s[-1] - times_s[0]
    gaps_s = [later - earlier for earlier, later in pairwise(times_s)]
    shared = [tokens for tokens in reuse.known_tokens if tokens]
    turns = Counter(request.session for request in trace.requests if request.session)
    return TraceStats(
        name=trace.name,
        block_size_tokens=reuse.block_size_tokens,
        requests=len(trace.requests),
        duration_s=round(duration_s, 3),
        rate_per_s=round(len(trace.requests) / duration_s, 4) if duration_s else None,
        peak_per_minute=max(per_minute(trace)),
        gap_cv=round(pstdev(gaps_s) / fmean(gaps_s), 3) if duration_s else None,
        input_tokens=Spread.of([request.input_tokens for request in trace.requests]),
        output_tokens=Spread.of([request.output_tokens for request in trace.requests]),
        distinct_blocks=reuse.distinct_blocks,
        ideal_reuse=round(reuse.ideal, 4),
        pooled_reuse=tuple(CacheSize(blocks, round(reuse.pooled(blocks), 4)) for blocks in cache_blocks or cache_sizes(reuse)),
        sharing_requests=round(len(shared) / len(trace.requests), 4),
        shared_tokens=Spread.of(shared) if shared else None,
        top_prefixes=tuple(reuse.shared_prefixes(TOP_PREFIXES)),
        sessions=len(turns) or None,
        turns=Spread.of(list(turns.values())) if turns else None,
        notes=trace.notes,
    )


def per_minute(trace: Trace) -> list[int]:
    """Requests in each minute from the first request on; the last minute may be cut short."""
    begin_s = trace.requests[0].at_s
    counts = Counter(int((request.at_s - begin_s) // MINUTE_S) for request in trace.requests)
    return [counts[minute] for minute in range(max(counts) + 1)]


def cache_sizes(reuse: PrefixReuse) -> list[int]:
    """Powers of 2, from about 1/1000 of the distinct blocks up to the first that is as good as endless."""
    most = max(reuse.distinct_blocks, 1).bit_length()
    enough = next(power for power in range(most + 1) if reuse.pooled(2**power) >= reuse.ideal or power == most)
    return [2**power for power in range(max(0, min(most - 10, enough)), enough + 1)]
