"""What ended when, and how much waited: in slots of some seconds, for as long as the page can look back. Pure, and bounded.

Fed with the events of ended requests, in any order and each as often as it comes, and with one sample of the gauges a second.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from ...schemas.events import RequestEnded
from ...schemas.signals import SECONDS, SHORT_SECONDS
from ...schemas.timeline import Stage, stages, ttft_s
from .histogram import Histogram, merged

SLOT_S = 5
SLOTS = 180
RECENT = 200
MS = 1e-3


@dataclass(frozen=True, slots=True)
class Gauges:
    """How much there is of something at one moment. `waiting_requests`: on the queue or kept back by routers."""

    waiting_requests: int = 0
    waiting_jobs: int = 0
    waiting_handoffs: int = 0
    running_prefill: int = 0
    running_decode: int = 0


@dataclass
class Slot:
    """What ended in one stretch of time. `stage_s`: sums over the requests that passed the stage, which `stage_requests` counts."""

    ended: Counter[str] = field(default_factory=Counter[str])
    prompt_tokens: int = 0
    cached_tokens: int = 0
    predicted_tokens: int = 0
    completion_tokens: int = 0
    moved_bytes: int = 0
    moved: int = 0
    moving_s: float = 0.0
    attempts: int = 0
    stage_s: dict[Stage, float] = field(default_factory=dict[Stage, float])
    stage_requests: Counter[Stage] = field(default_factory=Counter[Stage])
    ttft: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    itl: Histogram = field(default_factory=lambda: Histogram(SHORT_SECONDS))

    @property
    def requests(self) -> int:
        return self.ended.total()

    def stage_mean_s(self, stage: Stage) -> float | None:
        passed = self.stage_requests[stage]
        return self.stage_s.get(stage, 0.0) / passed if passed else None

    def passed(self, stage: Stage, seconds: float, requests: int = 1) -> None:
        self.stage_s[stage] = self.stage_s.get(stage, 0.0) + seconds
        self.stage_requests[stage] += requests

    def add(self, event: RequestEnded) -> None:
        self.ended[event.outcome] += 1
        self.attempts += event.attempt
        self.completion_tokens += event.completion_tokens
        first_s, gap_s = ttft_s(event.times_ms, MS), itl_s(event)
        if first_s is not None:  # what never reached a worker says nothing of caches
            self.ttft.observe(first_s)
            self.prompt_tokens += event.prompt_tokens
            self.cached_tokens += event.cached_tokens
            self.predicted_tokens += event.predicted_cached_tokens
        if gap_s is not None:
            self.itl.observe(gap_s)
        if event.kv_bytes:
            self.moved += 1
            self.moved_bytes += event.kv_bytes
        for stage, seconds in stages(event.times_ms, MS).items():
            self.passed(stage, seconds)
            if stage == "transfer":
                self.moving_s += seconds


def itl_s(event: RequestEnded) -> float | None:
    """Mean time between two tokens of a finished answer: what `gen_ai.server.time_per_output_token` is."""
    first, ended = event.times_ms.get("first_token"), event.times_ms.get("ended")
    if event.outcome != "finished" or first is None or ended is None or event.completion_tokens < 2:
        return None
    return max(0.0, ended - first) * MS / (event.completion_tokens - 1)


def joined(slots: Iterable[Slot]) -> Slot:
    parts = list(slots)
    whole = Slot(ttft=merged((slot.ttft for slot in parts), SECONDS), itl=merged((slot.itl for slot in parts), SHORT_SECONDS))
    for slot in parts:
        whole.ended += slot.ended
        whole.prompt_tokens += slot.prompt_tokens
        whole.cached_tokens += slot.cached_tokens
        whole.predicted_tokens += slot.predicted_tokens
        whole.completion_tokens += slot.completion_tokens
        whole.moved_bytes += slot.moved_bytes
        whole.moved += slot.moved
        whole.moving_s += slot.moving_s
        whole.attempts += slot.attempts
        for stage, seconds in slot.stage_s.items():
            whole.passed(stage, seconds, slot.stage_requests[stage])
    return whole


class History:
    """`recent`: the newest events, the last one first."""

    def __init__(self) -> None:
        self._slots: dict[int, dict[str, Slot]] = {}
        self._ids: dict[int, set[str]] = {}
        self._gauges: dict[int, Gauges] = {}
        self._recent: OrderedDict[str, RequestEnded] = OrderedDict()

    @property
    def recent(self) -> list[RequestEnded]:
        return sorted(self._recent.values(), key=lambda event: event.ended_ms, reverse=True)

    def find(self, request_id: str) -> RequestEnded | None:
        """Among the recent ones."""
        return self._recent.get(request_id)

    @property
    def models(self) -> list[str]:
        return sorted({model for by_model in self._slots.values() for model in by_model})

    def add(self, event: RequestEnded) -> None:
        place = place_of(event.ended_ms)
        known = self._ids.setdefault(place, set())
        if event.id in known:
            return
        known.add(event.id)
        self._slots.setdefault(place, {}).setdefault(event.model, Slot()).add(event)
        self._recent[event.id] = event
        while len(self._recent) > RECENT:
            self._recent.popitem(last=False)

    def sample(self, now_ms: int, gauges: Gauges) -> None:
        """The last one of a slot stands for it."""
        self._gauges[place_of(now_ms)] = gauges
        newest = place_of(now_ms) + 1
        for kept in (self._slots, self._ids, self._gauges):
            for place in [place for place in kept if not newest - SLOTS <= place <= newest]:  # nor what claims to be of the future
                del kept[place]

    def gauges(self, place: int) -> Gauges | None:
        return self._gauges.get(place)

    def over(self, first: int, last: int, model: str = "") -> Slot:
        """All slots from one place to another, both counted; of one model, or of all."""
        return joined(
            slot
            for place in range(first, last + 1)
            for name, slot in self._slots.get(place, {}).items()
            if not model or name == model
        )  # fmt: skip


def place_of(time_ms: float) -> int:
    return int(time_ms // (SLOT_S * 1000))
