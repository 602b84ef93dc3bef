"""Several replays of one trace, side by side in processes. The results come in the order of the settings, whatever ended first."""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import Any

from ...consumers.parent_death import die_with_parent
from .replay import replay
from .replay_result import ReplayResult
from .replay_settings import ReplaySettings
from .trace import Trace

Progress = Callable[[int, float], None]
"""Told the place of a replay, and the part of it that is done."""
LOOK_EVERY_S = 0.2


def replay_all(
    traces: Sequence[Trace], settings: Sequence[ReplaySettings], jobs: int = 0, progress: Progress | None = None
) -> list[ReplayResult]:
    """`traces`: one for all, or one for each. `jobs`: processes at a time (0: as many as cores, 1: none but this one).

    Raises SetupError for a trace that some of the settings cannot run.
    """
    jobs = min(jobs or os.cpu_count() or 1, len(settings))
    each = list(traces) * len(settings) if len(traces) == 1 else list(traces)
    tell = progress or (lambda _place, _done: None)
    if jobs == 1:
        return [replay(trace, one, _telling(tell, place)) for place, (trace, one) in enumerate(zip(each, settings, strict=True))]
    return _in_processes(each, settings, jobs, tell)


def _telling(tell: Progress, place: int) -> Callable[[float], None]:
    return lambda done: tell(place, done)


def _in_processes(traces: Sequence[Trace], settings: Sequence[ReplaySettings], jobs: int, tell: Progress) -> list[ReplayResult]:
    context = multiprocessing.get_context("spawn")  # a fork would copy this process's threads' locks
    done = context.Array("d", len(settings), lock=False)
    with ProcessPoolExecutor(jobs, context, _start, (done, os.getpid())) as pool:
        futures = [pool.submit(_one, place, trace, one) for place, (trace, one) in enumerate(zip(traces, settings, strict=True))]
        waiting: set[Future[ReplayResult]] = set(futures)
        try:
            while waiting:
                ended, waiting = wait(waiting, LOOK_EVERY_S, FIRST_COMPLETED)
                for future in ended:
                    future.result()
                for place, part in enumerate(done):
                    tell(place, part)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        return [future.result() for future in futures]


_done: Any = None
"""In a process of the pool: the parts done, shared with its parent."""


def _start(done: Any, parent_pid: int) -> None:
    global _done
    die_with_parent(parent_pid)
    _done = done


def _one(place: int, trace: Trace, settings: ReplaySettings) -> ReplayResult:
    def tell(part: float) -> None:
        _done[place] = part

    result = replay(trace, settings, tell)
    tell(1.0)
    return result
