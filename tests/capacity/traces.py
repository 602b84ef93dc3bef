"""Small traces for the tests of this folder."""

from pathlib import Path

from jetwake.deploy.capacity.trace import Trace, TraceRequest
from jetwake.deploy.capacity.trace_formats import write_trace


def shared_prefixes(requests: int = 60, gap_s: float = 0.25, prefixes: int = 4, input_tokens: int = 1200, output_tokens: int = 20) -> Trace:
    """Each prompt is one of the prefixes (two stretches of 512 tokens) and something of its own."""
    made = [
        TraceRequest(place * gap_s, input_tokens, output_tokens, (place % prefixes, 100 + place % prefixes, 1000 + place))
        for place in range(requests)
    ]
    return Trace("shared", 512, tuple(made))


def written(trace: Trace, folder: Path, name: str = "trace.jsonl.gz") -> Path:
    path = folder / name
    write_trace(trace, path)
    return path
