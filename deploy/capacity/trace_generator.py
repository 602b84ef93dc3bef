"""Makes traces of agents' work from a seed. The workload itself is that of `agent_workload`; here several kinds of agents become one trace.

`mooncake-toolagent` has the published statistics of the Mooncake tool-and-agent trace (one hour of a production service):

- 23,608 requests, 8,596 input and 182 output tokens on average, 59 % of the prompts reusable; "pre-designed, often lengthy, system
  prompts that are fully repetitive": R. Qin et al., "Mooncake: Trading More Storage for Less Computation", FAST '25, table 2. The trace
  is `FAST25-release/traces/toolagent_trace.jsonl` of https://github.com/kvcache-ai/Mooncake.
- Counted in the trace by its users: 3,537 s in steps of 3 s; 183,300 distinct blocks of 512 tokens among 409,600, that is 55.3 %
  reusable by blocks, and 34.6, 44.9, 50.8 and 55.1 % by one LRU cache of 1, 5, 10 and 25 % of the distinct ones; input tokens at 50, 90,
  95 and 99 %: 6,345, 16,794, 26,081, 61,600; output median 30; 6,554 distinct beginnings of two blocks, of which one has 9,203 requests
  and one has 3,449, while 10,938 have only their first block in common ("Benchmarking the Sharded KV Router" in
  https://github.com/ai-dynamo/dynamo, and others). The two share 12 and 5 blocks.

So it is three kinds: a chat of some turns behind a short system prompt, and two tools with one long system prompt each, asked once a
session. What is not published (how long sessions, turns and answers are) was set by the chat trace of the same release.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from heapq import merge
from typing import Any

from ...schemas.errors import SetupError
from .agent_workload import AgentRequest, AgentSettings, Skewed, agent_requests
from .trace import Trace, TraceRequest


@dataclass(frozen=True)
class TraceSettings:
    """`kinds`: the agents that come side by side, each with its own rate. `step_s`: arrivals are told in steps of this; 0: as they are."""

    name: str
    kinds: tuple[AgentSettings, ...]
    step_s: float = 0.0
    stretch_tokens: int = 64

    def seeded(self, seed: int) -> "TraceSettings":
        return replace(self, kinds=tuple(replace(kind, seed=seed * len(self.kinds) + place) for place, kind in enumerate(self.kinds)))

    def scaled(self, requests: int | None, rate_per_s: float | None) -> "TraceSettings":
        """As many requests, at such a rate, in all; each kind keeps its part. Fewer requests are a shorter time of the same."""
        requests_before = sum(kind.requests for kind in self.kinds)
        more = 1.0 if requests is None else requests / requests_before
        faster = 1.0 if rate_per_s is None else rate_per_s / sum(kind.rate_per_s for kind in self.kinds)
        kinds = [
            replace(
                kind,
                requests=max(1, round(kind.requests * more)),
                sessions=max(1, round(kind.sessions * more)),
                rate_per_s=kind.rate_per_s * faster,
            )
            for kind in self.kinds
        ]
        return replace(self, kinds=tuple(kinds))


_HOUR_S = 3515.0
_TOOL_ANSWERS = Skewed(median=8, mean=16, least=1, most=2000)


def _tool(name: str, requests: int, prefix_tokens: int, user_tokens: Skewed, answer_tokens: Skewed) -> AgentSettings:
    return AgentSettings(
        requests=requests,
        rate_per_s=requests / _HOUR_S,
        sessions=requests,
        open_sessions=1,
        prefixes=1,
        prefix_tokens=(prefix_tokens, prefix_tokens),
        user_tokens=user_tokens,
        answer_tokens=answer_tokens,
        burst_share=0.0,
        name=name,
    )


PRESETS = {
    "agents": TraceSettings("agents", (AgentSettings(),)),
    "mooncake-toolagent": TraceSettings(
        "mooncake-toolagent",
        (
            AgentSettings(
                requests=10_956,
                rate_per_s=10_956 / _HOUR_S,
                sessions=6552,
                open_sessions=900,
                prefixes=1,
                prefix_tokens=(512, 512),
                first_tokens=Skewed(median=5300, mean=10_850, least=380, most=110_000),
                user_tokens=Skewed(median=60, mean=1100, least=4, most=12_000),
                answer_tokens=(1, 745),
                burst_share=0.0,
                name="chat/",
            ),
            _tool("search/", 9203, 6150, Skewed(median=380, mean=900, least=10, most=20_000), _TOOL_ANSWERS),
            _tool("title/", 3449, 2570, Skewed(median=400, mean=560, least=10, most=8000), Skewed(median=18, mean=20, least=1, most=200)),
        ),
        step_s=3.0,
        stretch_tokens=512,
    ),
}


def trace_settings(
    preset: str, seed: int = 0, requests: int | None = None, rate_per_s: float | None = None, own: Mapping[str, Any] | None = None
) -> TraceSettings:
    """A preset with what was asked for in its place; `own`: fields of AgentSettings, for a preset of one kind. Raises SetupError."""
    if preset not in PRESETS:
        raise SetupError(f"no preset is called {preset!r}; there are {', '.join(PRESETS)}")
    settings = PRESETS[preset].scaled(requests, rate_per_s).seeded(seed)
    if own and len(settings.kinds) > 1:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in own)
        raise SetupError(f"{preset} is made of {len(settings.kinds)} kinds of agents, as published; {options}: only with --preset agents")
    return replace(settings, kinds=tuple(replace(kind, **(own or {})) for kind in settings.kinds))


def generate_trace(settings: TraceSettings) -> Trace:
    workloads = (agent_requests(kind) for kind in settings.kinds)
    requests = merge(*workloads, key=lambda request: request.at_s)
    return Trace(settings.name, settings.stretch_tokens, tuple(_told(requests, settings)))


def trace_of(requests: Iterable[AgentRequest], name: str, stretch_tokens: int) -> Trace:
    """A workload as a trace: the same times and lengths, and content ids where it has tokens."""
    return Trace(name, stretch_tokens, tuple(_told(requests, TraceSettings(name, (), 0.0, stretch_tokens))))


def _told(requests: Iterable[AgentRequest], settings: TraceSettings) -> Iterator[TraceRequest]:
    size, step_s = settings.stretch_tokens, settings.step_s
    if size < 1:
        raise SetupError(f"--stretch must be at least 1, not {size}")
    ids: dict[tuple[str, int], int] = {}
    for request in requests:
        content, begin, end = list[int](), 0, size
        for segment in request.segments:
            while end <= begin + segment.length_tokens:
                content.append(ids.setdefault((segment.source, end - begin), len(ids)))
                end += size
            begin += segment.length_tokens
        if end - size < begin:
            content.append(ids.setdefault((f"{request.segments[-1].source}/end", begin), len(ids)))
        at_s = request.at_s // step_s * step_s if step_s else request.at_s
        session = request.segments[-1].source.split("/turn-")[0]
        yield TraceRequest(round(at_s, 6), begin, request.max_tokens, tuple(content), session)
