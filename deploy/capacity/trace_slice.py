"""Parts of a trace, faster or slower. Pure."""

from dataclasses import replace

from ...schemas.errors import SetupError
from .trace import Trace


def sliced(trace: Trace, limit: int = 0, speedup: float = 1.0) -> Trace:
    """The first `limit` requests (0: all), the gaps between them divided by `speedup`. Raises SetupError when nothing is left."""
    if speedup <= 0:
        raise SetupError(f"--speedup must be above 0, not {speedup:g}")
    requests = trace.requests[:limit] if limit else trace.requests
    if not requests:
        raise SetupError(f"{trace.name} has no requests")
    if speedup != 1:
        requests = tuple(replace(request, at_s=request.at_s / speedup) for request in requests)
    return replace(trace, requests=requests) if requests is not trace.requests else trace


def rate_per_s(trace: Trace) -> float:
    """Requests per second between the first and the last; 0 when all come at once."""
    span_s = trace.requests[-1].at_s - trace.requests[0].at_s
    return (len(trace.requests) - 1) / span_s if span_s > 0 else 0.0
