"""What a replay notes over time: samples for plots, and the exact depth of its queues."""

from collections.abc import Sequence, Sized
from dataclasses import dataclass

from .replay_links import Links
from .replay_result import QueueDepth, Series
from .replay_worker import ReplayWorker

SAMPLES = 360
LEAST_INTERVAL_S = 0.25
ROUTER = "router"


@dataclass
class _Depth:
    """Of one pool's queue, integrated over time."""

    now: int = 0
    most: int = 0
    area: float = 0.0
    since_s: float = 0.0

    def change(self, by: int, now_s: float) -> None:
        self.area += self.now * (now_s - self.since_s)
        self.since_s = now_s
        self.now += by
        self.most = max(self.most, self.now)


class Sampler:
    """`handoffs`: those that wait for a decode worker; they are the queue of its pool."""

    def __init__(self, workers: Sequence[ReplayWorker], links: Links, last_arrival_s: float, handoffs: Sized) -> None:
        self._workers = workers
        self._links = links
        self._handoffs = handoffs
        self._interval_s = max(LEAST_INTERVAL_S, last_arrival_s / SAMPLES)
        self.next_s = self._interval_s
        self.series = Series()
        self._depths: dict[str, _Depth] = {ROUTER: _Depth(), **{worker.role: _Depth() for worker in workers}}
        self._waiting = {worker.name: 0 for worker in workers}
        self._seen_handoffs = 0
        self._prompt_tokens = self._cached_tokens = 0
        self._link_busy_s: dict[str, float] = {}
        self._last_s = 0.0

    def changed(self, worker: ReplayWorker, now_s: float) -> None:
        before, waiting = self._waiting[worker.name], worker.waiting
        if waiting != before:
            self._waiting[worker.name] = waiting
            self._depths[worker.role].change(waiting - before, now_s)
        handoffs = len(self._handoffs)
        if handoffs != self._seen_handoffs:
            self._depths["decode"].change(handoffs - self._seen_handoffs, now_s)
            self._seen_handoffs = handoffs

    def kept(self, requests: int, now_s: float) -> None:
        """So many wait in the router."""
        depth = self._depths[ROUTER]
        if requests != depth.now:
            depth.change(requests - depth.now, now_s)

    def prefilled(self, prompt_tokens: int, cached_tokens: int) -> None:
        self._prompt_tokens += prompt_tokens
        self._cached_tokens += cached_tokens

    def sample(self, now_s: float) -> None:
        """One sample for each interval that has passed. What did not change meanwhile was so all the time."""
        for worker in self._workers:
            worker.engine.look(now_s)
        while self.next_s <= now_s:
            self._note(self.next_s)
            self.next_s += self._interval_s

    def _note(self, at_s: float) -> None:
        series = self.series
        series.at_s.append(round(at_s, 6))
        series.prompt_tokens.append(self._prompt_tokens)
        series.cached_tokens.append(self._cached_tokens)
        self._prompt_tokens = self._cached_tokens = 0
        for role, depth in self._depths.items():
            series.queue_depth.setdefault(role, []).append(depth.now)
            if role == ROUTER:
                continue
            pool = [worker.engine for worker in self._workers if worker.role == role]
            series.running.setdefault(role, []).append(sum(engine.running for engine in pool))
            used, blocks = sum(engine.pool.used_blocks for engine in pool), sum(engine.pool.num_blocks for engine in pool)
            series.used_kv_fraction.setdefault(role, []).append(round(used / blocks, 4))
        for name, busy_s in self._links.busy_s(at_s).items():
            known = series.link_use.setdefault(name, [0.0] * (len(series.at_s) - 1))
            known.append(round((busy_s - self._link_busy_s.get(name, 0.0)) / (at_s - self._last_s), 4))
            self._link_busy_s[name] = busy_s
        self._last_s = at_s

    def queue_depth(self, now_s: float) -> dict[str, QueueDepth]:
        for depth in self._depths.values():
            depth.change(0, now_s)
        return {role: QueueDepth(depth.area / now_s if now_s else 0.0, depth.most) for role, depth in self._depths.items()}
