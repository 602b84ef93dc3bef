"""Which fleet of N GPUs carries the most of a workload within its limits: replays a slice of the trace at several speeds. Pure but for `run`.

Every fleet first meets the trace at its own speed. Then its highest speed is looked for by doubling or halving and bisection; a fleet that is
known to fail at a speed where another holds is left alone. This takes for granted that a fleet that fails at a speed fails at all higher ones.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...schemas.errors import SetupError
from .grid import FleetSize, GridOptions, described, fleet_of, knobs_of, settings_of
from .profiles import Profile
from .replay_result import ReplayResult
from .replay_settings import ReplaySettings
from .trace import Trace
from .trace_slice import rate_per_s, sliced

SPEEDS = (1 / 64, 64.0)
"""Of the trace's own. Beyond, nothing is looked for."""

Run = Callable[[Sequence[Trace], Sequence[ReplaySettings]], list[ReplayResult]]


@dataclass(frozen=True)
class Limits:
    """A request is good when its first token came within `ttft_s` and the mean time between its tokens is at most `itl_s`.

    A fleet carries a rate when at least `share` of all requests are good; those that fail count as not good.
    """

    ttft_s: float
    itl_s: float
    share: float = 0.9

    def __post_init__(self) -> None:
        """Raises SetupError."""
        if self.ttft_s <= 0 or self.itl_s <= 0:
            raise SetupError("--ttft-slo-ms and --itl-slo-ms must be above 0")
        if not 0 < self.share <= 1:
            raise SetupError(f"--share must be above 0 and at most 1, not {self.share}")


@dataclass(frozen=True)
class Attempt:
    """At one speed. `share` of the requests was good; `ttft_share` and `itl_share` kept one limit each."""

    speed: float
    rate_per_s: float
    share: float
    ttft_share: float
    itl_share: float

    @property
    def goodput_per_s(self) -> float:
        return self.rate_per_s * self.share


@dataclass
class Candidate:
    """One fleet. The highest speed that it carries is from `carried` to `failed`."""

    settings: ReplaySettings
    gpus: int
    attempts: list[Attempt] = field(default_factory=list[Attempt])
    carried: Attempt | None = None
    failed: Attempt | None = None

    @property
    def fleet(self) -> FleetSize:
        return fleet_of(self.settings)

    @property
    def own_speed(self) -> Attempt:
        return self.attempts[0]

    def learn(self, attempt: Attempt, share: float) -> None:
        self.attempts.append(attempt)
        if attempt.share >= share:
            self.carried = attempt
        else:
            self.failed = attempt

    def next_speed(self, best_carried: float, tolerance: float) -> float | None:
        """None when nothing more is worth knowing."""
        if not self.attempts:
            return 1.0
        if self.failed is None:
            return 2 * self.attempts[-1].speed if self.attempts[-1].speed < SPEEDS[1] else None
        if self.failed.speed <= best_carried * (1 + tolerance):
            return None
        if self.carried is None:
            return self.failed.speed / 2 if self.failed.speed > SPEEDS[0] else None
        if self.failed.speed <= self.carried.speed * (1 + tolerance):
            return None
        return math.sqrt(self.failed.speed * self.carried.speed)


@dataclass
class Sizing:
    """`candidates`: the best first. `whole`: the best fleet on the whole trace, at the rate it carried on the slice."""

    trace_name: str
    gpus: int
    limits: Limits
    slice_requests: int
    requests: int
    tolerance: float
    candidates: list[Candidate]
    whole: Attempt | None = None
    replays: int = 0

    @property
    def best(self) -> Candidate:
        return self.candidates[0]

    def as_dict(self) -> dict[str, Any]:
        return {
            "trace": self.trace_name,
            "gpus": self.gpus,
            "slo": {"ttft_ms": self.limits.ttft_s * 1e3, "itl_ms": self.limits.itl_s * 1e3, "share": self.limits.share},
            "requests": self.requests,
            "slice_requests": self.slice_requests,
            "replays": self.replays,
            "candidates": [_candidate_dict(one) for one in self.candidates],
            "recommended": _candidate_dict(self.best) if self.best.carried else None,
            "whole_trace": _attempt_dict(self.whole),
        }


def candidates_of(options: GridOptions, profiles: Sequence[Profile], gpus: int, gpus_per_worker: int, policy: str) -> list[Candidate]:
    """Aggregated, and every split into prefill and decode workers, for each profile. Raises SetupError."""
    found, knobs = list[Candidate](), knobs_of(options.knobs)
    for profile in profiles:
        each = gpus_per_worker or profile.gpus_per_worker
        workers = gpus // each
        if not workers:
            raise SetupError(f"a worker of {profile.name} takes {each} GPUs, and there are {gpus}")
        sizes = [FleetSize(aggregated=workers), *(FleetSize(prefill=count, decode=workers - count) for count in range(1, workers))]
        found += [Candidate(settings_of(options, size, policy, options.blocks, profile, knobs), workers * each) for size in sizes]
    return found


def size(
    trace: Trace, candidates: Sequence[Candidate], gpus: int, limits: Limits, slice_requests: int, tolerance: float, run: Run
) -> Sizing:
    """Raises SetupError for a trace without times."""
    part = sliced(trace, slice_requests)
    own_rate_per_s = rate_per_s(part)
    if not own_rate_per_s:
        raise SetupError(f"all {len(part.requests)} requests of {trace.name} come at once: sizing needs a trace with times")
    sizing = Sizing(trace.name, gpus, limits, len(part.requests), len(trace.requests), tolerance, list(candidates))
    while True:
        best_carried = max((one.carried.speed for one in candidates if one.carried), default=0.0)
        wanted = [(one, speed) for one in candidates if (speed := one.next_speed(best_carried, tolerance)) is not None]
        if not wanted:
            break
        results = run([sliced(part, speedup=speed) for _, speed in wanted], [one.settings for one, _ in wanted])
        sizing.replays += len(results)
        for (one, speed), result in zip(wanted, results, strict=True):
            one.learn(_attempt(result, speed, own_rate_per_s * speed, limits), limits.share)
    sizing.candidates.sort(key=_worth, reverse=True)
    if sizing.best.carried and len(part.requests) < len(trace.requests):
        rate = sizing.best.carried.rate_per_s
        speed = rate / rate_per_s(trace)
        [result] = run([sliced(trace, speedup=speed)], [sizing.best.settings])
        sizing.replays += 1
        sizing.whole = _attempt(result, speed, rate, limits)
    return sizing


def _worth(candidate: Candidate) -> tuple[float, float, float]:
    carried = candidate.carried.rate_per_s if candidate.carried else 0.0
    return carried, candidate.own_speed.share, -candidate.gpus


def _attempt(result: ReplayResult, speed: float, rate: float, limits: Limits) -> Attempt:
    count = len(result.requests)
    quick = [record.completed and record.ttft_s <= limits.ttft_s for record in result.requests]
    steady = [record.completed and record.itl_s <= limits.itl_s for record in result.requests]
    good = sum(first and rest for first, rest in zip(quick, steady, strict=True))
    return Attempt(speed, rate, good / count, sum(quick) / count, sum(steady) / count)


def _attempt_dict(attempt: Attempt | None) -> dict[str, float] | None:
    if attempt is None:
        return None
    return {
        "speed": round(attempt.speed, 4),
        "rate_per_s": round(attempt.rate_per_s, 4),
        "goodput_per_s": round(attempt.goodput_per_s, 4),
        "share": round(attempt.share, 4),
        "ttft_share": round(attempt.ttft_share, 4),
        "itl_share": round(attempt.itl_share, 4),
    }


def _candidate_dict(candidate: Candidate) -> dict[str, Any]:
    return {
        **described(candidate.settings),
        "gpus_used": candidate.gpus,
        "own_speed": _attempt_dict(candidate.own_speed),
        "carries": _attempt_dict(candidate.carried),
        "fails_at": _attempt_dict(candidate.failed),
    }
