"""The requests that a router keeps back until `holding.plan` says that they go: futures and timers around that pure decision.

Promises: what it decides is booked before anything else is decided, and what is booked for a request that goes away meanwhile is
withdrawn.
"""

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..schemas.errors import NoWorker
from ..schemas.requests import InferenceRequest
from .assignment import Waiting
from .delivery_time import DeliveryTime
from .fleet import Candidate
from .holding import nobody_before_s, plan
from .lane_ledger import Booking
from .policies import Decision, KvAware, Query
from .prefix_index import PrefixIndex

LEAST_PAUSE_S = 0.001
"""Between two looks at those that wait."""
MATCH_HOLDS_S = 0.02
"""How long what was found in the index for a request is believed, once a worker may be free for it."""


@dataclass(frozen=True)
class Case:
    """One request with all that a policy decides on. `looked_s`: when `query` was made."""

    request: InferenceRequest
    hashes: list[int]
    query: Query
    choice: tuple[Candidate, ...]
    looked_s: float = 0.0


@dataclass(frozen=True)
class Turn:
    """A decision that is booked already."""

    case: Case
    decision: Decision
    booking: Booking


@dataclass(eq=False)
class _Kept:
    """`is_new`: no plan was made since it came."""

    case: Case
    waiting: Waiting
    turn: "asyncio.Future[Turn]"
    is_new: bool = True


class WaitingRoom:
    """`candidates` gives the workers for a model as they are now. `book` counts a decision, and `withdraw` takes that back. `delivery`: how
    long jobs are on their way.
    """

    def __init__(
        self,
        policy: KvAware,
        index: PrefixIndex,
        candidates: Callable[[str], tuple[Candidate, ...]],
        book: Callable[[Case, Decision], Booking],
        withdraw: Callable[[Booking], None],
        delivery: DeliveryTime,
    ) -> None:
        self._policy = policy
        self._delivery = delivery
        self._index = index
        self._candidates = candidates
        self._book = book
        self._withdraw = withdraw
        self._kept: list[_Kept] = []
        self._kept_by_lane: dict[str, dict[str, int]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._look_at_s = 0.0

    @property
    def kept(self) -> int:
        return len(self._kept)

    async def turn(self, case: Case) -> Turn:
        """When it goes, and where. Raises NoWorker when there is nobody any more."""
        waiting = Waiting(case.query, time.monotonic(), case.request.failed_workers)
        kept = _Kept(case, waiting, asyncio.get_running_loop().create_future())
        self._kept.append(kept)
        self._look_in(0.0)
        try:
            return await kept.turn
        except asyncio.CancelledError:
            if kept.turn.done() and not kept.turn.cancelled() and kept.turn.exception() is None:
                self._withdraw(kept.turn.result().booking)
            raise
        finally:
            if kept in self._kept:
                self._kept.remove(kept)

    def look(self) -> None:
        """Something has changed at the workers."""
        if self._kept:
            self._look_in(LEAST_PAUSE_S)

    def _look_in(self, delay_s: float) -> None:
        loop = asyncio.get_running_loop()
        at_s = loop.time() + delay_s
        if self._timer is not None and not self._timer.cancelled():
            if self._look_at_s <= at_s:
                return
            self._timer.cancel()
        self._look_at_s = at_s
        self._timer = loop.call_at(at_s, self._let_go)

    def _let_go(self) -> None:
        self._timer = None
        now_s, look_again_s = time.monotonic(), math.inf
        for model in {kept.case.request.model for kept in self._kept}:
            of_model = [kept for kept in self._kept if kept.case.request.model == model]
            try:
                look_again_s = min(look_again_s, self._let_go_of(model, of_model, now_s))
            except Exception as error:  # noqa: BLE001  it is raised where it belongs: in the handlers of those who wait here
                for kept in of_model:
                    if not kept.turn.done():
                        kept.turn.set_exception(error)
        self._kept = [kept for kept in self._kept if not kept.turn.done()]
        if not self._kept:
            self._kept_by_lane.clear()
        if self._kept and look_again_s < math.inf:
            self._look_in(max(look_again_s - now_s, LEAST_PAUSE_S))

    def _let_go_of(self, model: str, of_model: list[_Kept], now_s: float) -> float:
        """Returns when to look again."""
        candidates = self._candidates(model)
        if not candidates:
            raise NoWorker(f"no worker for {model} is ready with a compatible peer")
        by_lane, new = self._kept_by_lane.get(model, {}), sum(kept.is_new for kept in of_model)
        every, delivery_s = [kept.waiting for kept in of_model], self._delivery.seconds
        nobody_before = nobody_before_s(self._policy, every, candidates, now_s, by_lane, new, delivery_s)
        if now_s < nobody_before:
            return nobody_before
        kept_of: dict[Waiting, _Kept] = {}
        for kept in of_model:
            if now_s - kept.case.looked_s > MATCH_HOLDS_S:
                query = replace(kept.case.query, matched_blocks=self._index.match(kept.case.hashes, now_s))
                kept.case = replace(kept.case, query=query, looked_s=now_s)
                kept.waiting.query = query
            kept.is_new = False
            kept_of[kept.waiting] = kept
        made = plan(self._policy, list(kept_of), candidates, now_s, delivery_s)
        self._kept_by_lane[model] = made.kept
        for waiting, decision in made.sends:
            kept = kept_of[waiting]
            if not kept.turn.done():  # else it was cancelled
                case = replace(kept.case, choice=candidates)
                kept.turn.set_result(Turn(case, decision, self._book(case, decision)))
        return made.look_again_s
