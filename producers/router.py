"""The router's loop: a request in, a policy's decision, a job on one worker's queue out.

Reads `jw.requests.<model>.<class>`, worker cards, `jw.load.<worker>` and what other routers tell on `jw.routed.<router>`; writes
`jw.prefill.<worker>-<incarnation>`, or a failed, cancelled or expired terminal. Promises: a request is acknowledged only when its
job is stored, or its terminal is.
"""

import asyncio
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..pipeline.catalogue import ModelCatalogue
from ..pipeline.clock import ServerClock
from ..pipeline.connection import Bus, RawMessage
from ..pipeline.consume import Delivery
from ..pipeline.endings import Endings
from ..pipeline.in_flight import InFlight
from ..pipeline.publish import Publisher
from ..pipeline.registry import Registry
from ..schemas import subjects
from ..schemas.blocks import block_hashes, pack_hashes, root_hash, unpack_hashes
from ..schemas.codec import decode
from ..schemas.errors import JetwakeError, NoWorker, Overloaded, RequestEnded, StreamFull, Undecodable, UnknownModel
from ..schemas.prefill import PrefillJob
from ..schemas.requests import InferenceRequest
from ..schemas.routing import ConsideredLane, Explanation, Routed
from ..schemas.workers import ModelCard, WorkerLoad
from .admission import admit
from .batch_share import IDLE_S, LATELY_S, decode_has_room, startable
from .fleet import Candidate, Fleet
from .holding import Waiting, plan
from .lane_ledger import Booking, LaneLedger
from .policies import Decision, KvAware, Policy, Query, describe
from .prefix_index import PrefixIndex
from .silent_workers import SilenceAlarm

log = logging.getLogger(__name__)

REMEMBERED_DECISIONS = 10_000
REMEMBERED_LANES = 1_000
HOLD_S = 1.0
"""How long full queues are believed to be full when no worker says that it took something."""
INTERACTIVE_PER_BATCH = 16
"""The small share of batch: one request for so many interactive ones, even when no worker is free."""


LEAST_PAUSE_S = 0.001
"""Between two looks at the requests that are kept for want of a free worker."""
MATCH_HOLDS_S = 0.02
"""How long what was found in the index for a kept request is believed."""


@dataclass(frozen=True)
class _Case:
    """One request with all that a policy decides on. `looked_s`: when `query` was made."""

    request: InferenceRequest
    hashes: list[int]
    query: Query
    choice: tuple[Candidate, ...]
    looked_s: float = 0.0


@dataclass(frozen=True)
class _Turn:
    """A decision that is booked already."""

    case: _Case
    decision: Decision
    booking: Booking


@dataclass(eq=False)
class _Kept:
    """A request that waits for `_plan` to say that it goes."""

    case: _Case
    waiting: Waiting
    turn: "asyncio.Future[_Turn]"


class Router:
    def __init__(
        self,
        name: str,
        policy_name: str,
        policy: Policy,
        *,
        publisher: Publisher,
        endings: Endings,
        clock: ServerClock,
        in_flight: InFlight,
        registry: Registry,
        catalogue: ModelCatalogue,
        index: PrefixIndex,
        alarm: SilenceAlarm,
        direct: bool = False,
        slots: int = 64,
    ) -> None:
        self._name = name
        self._policy_name = policy_name
        self._policy = policy
        self._publisher = publisher
        self._endings = endings
        self._clock = clock
        self._in_flight = in_flight
        self._registry = registry
        self._catalogue = catalogue
        self._index = index
        self._alarm = alarm
        self._direct = direct
        self._ledger = LaneLedger()
        self._fleet = Fleet(self._ledger)
        self._slots = slots
        self._in_hand = self._batch_in_hand = self._interactive_since_batch = 0
        self._interactive_s = float("-inf")
        self._session_lanes: OrderedDict[str, str] = OrderedDict()
        self._last_fetched: OrderedDict[str, int] = OrderedDict()
        self._full_until_s: dict[str, float] = {}
        self._kept: list[_Kept] = []
        self._planning: asyncio.TimerHandle | None = None
        self._models: dict[str, ModelCard] = {}
        self._decisions: OrderedDict[str, tuple[_Case, Decision, tuple[str, int]]] = OrderedDict()
        self.on_idle: Callable[[], None] = lambda: None  # called when a worker may have room for batch
        registry.on_change(self._forget_the_dead)

    async def listen(self, bus: Bus) -> None:
        await bus.subscribe(subjects.LOADS, self._on_load)
        await bus.subscribe(subjects.ROUTED, self._on_routed)

    def room(self) -> int:
        return 0 if self._holds() else self._slots - self._in_hand

    def batch_room(self) -> int:
        """Batch requests go only where one can start at once (`batch_share`), so that no interactive one finds a queue of them before it.

        They get a small share all the same: one for every so many interactive ones, however busy the workers are.
        """
        if self._holds():
            return 0
        due = self._interactive_since_batch // INTERACTIVE_PER_BATCH
        now = 0
        if decode_has_room(self._registry.workers, self._fleet.loads):
            now_s = time.monotonic()
            lately = now_s - self._interactive_s < LATELY_S
            now = sum(startable(choice, now_s, leave_one=lately) for choice in self.fleets().values())
        return min(self._slots - self._slots // 8 - self._in_hand, max(now - self._batch_in_hand, due))

    def _holds(self) -> bool:
        """Whether all queues of all models were found full and nothing was heard since: then requests wait where they are in order."""
        if not self._full_until_s:
            return False
        now_s = time.monotonic()
        return all(self._full_until_s.get(card.model, 0.0) > now_s for card in self._registry.workers.values())

    async def handle(self, delivery: Delivery[InferenceRequest]) -> None:
        request = delivery.message
        is_batch = request.priority_class == "batch"
        self._in_hand += 1
        self._batch_in_hand += is_batch
        self._interactive_since_batch = 0 if is_batch else self._interactive_since_batch + 1
        if not is_batch:
            self._interactive_s = time.monotonic()
        try:
            self._in_flight.check(request, "routing")
            card = await self._model_card(request.model)
            admit(request, card)
            await self._route(self._case(request, card))
        except RequestEnded as ending:
            await self._endings.ended_early(request, ending)
        finally:
            self._in_hand -= 1
            self._batch_in_hand -= is_batch

    async def fail(self, delivery: Delivery[InferenceRequest], error: JetwakeError) -> None:
        await self._endings.failed(delivery.message, error)

    async def explain(self, request: InferenceRequest) -> Explanation:
        """Where this request would go now; nothing is sent. Raises what refusing it would raise, and NoWorker."""
        card = await self._model_card(request.model)
        admit(request, card)
        case = self._case(request, card)
        return self._explanation(case, self._policy.choose(case.choice, case.query, case.looked_s))

    def explain_decided(self, request_id: str) -> Explanation | None:
        """Where this request went, while it is remembered; None when this router did not decide it."""
        decided = self._decisions.get(request_id)
        return None if decided is None else self._explanation(decided[0], decided[1])

    # -- what waits, for `rebalance` --------------------------------------------------------------------------------------

    def fleets(self) -> dict[str, tuple[Candidate, ...]]:
        """By model: the workers there are."""
        models = {card.model for card in self._registry.workers.values()}
        return {model: self._fleet.candidates(model, self._registry.workers) for model in models}

    def queued(self, lane: str) -> list[Booking]:
        return self._ledger.queued(lane)

    def decided(self, booking: Booking) -> InferenceRequest | None:
        """The request of this very job, if this router sent it and remembers. Another router may have sent a later attempt of it."""
        decided = self._decisions.get(booking.request_id)
        is_this = decided is not None and decided[2] == (booking.lane, booking.sequence) and booking.sequence > 0
        return decided[0].request if decided is not None and is_this else None

    def had_taken(self, lane: str, sequence: int) -> bool:
        """Whether a lane that is gone had fetched this far. True when its last word was not heard: that errs to the safe side."""
        return sequence <= self._last_fetched.get(lane, sequence)

    def withdraw(self, booking: Booking) -> None:
        self._ledger.withdraw(booking)

    # -- deciding -----------------------------------------------------------------------------------------------------

    def _case(self, request: InferenceRequest, card: ModelCard) -> _Case:
        """Raises NoWorker when nobody can take it now: the request stays in its queue."""
        choice = self._fleet.candidates(request.model, self._registry.workers, direct=self._direct)
        if not choice:
            raise NoWorker(f"no worker for {request.model} is ready with a compatible peer")
        if request.failed_workers:
            choice = tuple(candidate for candidate in choice if candidate.worker not in request.failed_workers) or choice
        root = root_hash(request.model, request.lora, request.cache_salt)
        hashes = block_hashes(request.prompt_tokens, card.block_size_tokens, root)
        query = Query(
            request.request_id,
            request.prompt_length_tokens,
            card.block_size_tokens,
            self._index.match(hashes, time.monotonic()),
            self._session_lanes.get(session_key(request), ""),
        )
        return _Case(request, hashes, query, choice, time.monotonic())

    async def _route(self, case: _Case) -> None:
        turn = await self._turn(case)
        self._in_flight.check(case.request, "routing")
        case, decision, booking = turn.case, turn.decision, turn.booking
        choice = case.choice
        while True:
            try:
                sequence = await self._send(case, decision, booking)
            except StreamFull:
                choice = tuple(candidate for candidate in choice if candidate.lane != decision.lane)
                if not choice:
                    break
                decision = self._policy.choose(choice, case.query, time.monotonic())
                booking = self._book(case, decision)
            else:
                self._remember(case, decision, sequence)
                return
        self._full_until_s[case.request.model] = time.monotonic() + HOLD_S
        raise Overloaded(f"the queues of all workers for {case.request.model} are full")

    async def _turn(self, case: _Case) -> _Turn:
        """At once, or when the policy that keeps requests back lets this one go."""
        if not isinstance(self._policy, KvAware):
            decision = self._policy.choose(case.choice, case.query, time.monotonic())
            return _Turn(case, decision, self._book(case, decision))
        waiting = Waiting(case.query, time.monotonic(), case.request.failed_workers)
        kept = _Kept(case, waiting, asyncio.get_running_loop().create_future())
        self._kept.append(kept)
        self._plan_soon(0.0)
        try:
            return await kept.turn
        except asyncio.CancelledError:
            if kept.turn.done() and not kept.turn.cancelled() and kept.turn.exception() is None:
                self._ledger.withdraw(kept.turn.result().booking)
            raise
        finally:
            if kept in self._kept:
                self._kept.remove(kept)

    def _plan_soon(self, delay_s: float) -> None:
        loop = asyncio.get_running_loop()
        at_s = loop.time() + delay_s
        if self._planning is not None and not self._planning.cancelled():
            if self._planning.when() <= at_s:
                return
            self._planning.cancel()
        self._planning = loop.call_at(at_s, self._plan)

    def _plan(self) -> None:
        """Lets go what can go. What it decides is booked before anything else is decided."""
        self._planning = None
        now_s, look_again_s = time.monotonic(), math.inf
        for model in {kept.case.request.model for kept in self._kept}:
            of_model = [kept for kept in self._kept if kept.case.request.model == model]
            try:
                look_again_s = min(look_again_s, self._plan_model(model, of_model, now_s))
            except Exception as error:  # noqa: BLE001  it is raised where it belongs: in the handlers of those who wait for this plan
                for kept in of_model:
                    if not kept.turn.done():
                        kept.turn.set_exception(error)
        self._kept = [kept for kept in self._kept if not kept.turn.done()]
        if self._kept and look_again_s < math.inf:
            self._plan_soon(max(look_again_s - now_s, LEAST_PAUSE_S))

    def _plan_model(self, model: str, of_model: list[_Kept], now_s: float) -> float:
        """Returns when to look again."""
        assert isinstance(self._policy, KvAware)
        candidates = self._fleet.candidates(model, self._registry.workers, direct=self._direct)
        if not candidates:
            raise NoWorker(f"no worker for {model} is ready with a compatible peer")
        kept_of: dict[Waiting, _Kept] = {}
        for kept in of_model:
            if now_s - kept.case.looked_s > MATCH_HOLDS_S:
                query = replace(kept.case.query, matched_blocks=self._index.match(kept.case.hashes, now_s))
                kept.case = replace(kept.case, query=query, looked_s=now_s)
                kept.waiting.query = query
            kept_of[kept.waiting] = kept
        made = plan(self._policy, list(kept_of), candidates, now_s)
        for waiting, decision in made.sends:
            kept = kept_of[waiting]
            if not kept.turn.done():  # else it was cancelled
                case = replace(kept.case, choice=candidates)
                kept.turn.set_result(_Turn(case, decision, self._book(case, decision)))
        return made.look_again_s

    def _book(self, case: _Case, decision: Decision) -> Booking:
        lane = decision.lane
        chosen = next(candidate for candidate in case.choice if candidate.lane == lane)
        booking = self._ledger.book(case.request.request_id, lane, chosen.prefill_s(case.query))
        self._index.predict(lane, case.hashes, time.monotonic())
        return booking

    async def _send(self, case: _Case, decision: Decision, booking: Booking) -> int:
        """The job's place in its queue. It is booked and predicted: decisions made meanwhile count it."""
        request, lane = case.request, decision.lane
        job = PrefillJob(
            request=request,
            router=self._name,
            reason=decision.reason,
            predicted_cached_tokens=case.query.cached_tokens(lane),
            routed_ns=self._clock.now_ns(),
        )
        try:
            stored = await self._publisher.store(
                subjects.prefill(lane),
                job,
                message_id=subjects.message_id(request.request_id, "prefill", request.attempt),
                headers={subjects.REQUEST_ID_HEADER: subjects.reply_target(request.model, request.gateway, request.request_id)},
            )
        except BaseException:
            self._ledger.withdraw(booking)
            raise
        self._ledger.stored(booking, stored.sequence)
        routed = Routed(
            router=self._name,
            request_id=request.request_id,
            lane=lane,
            sequence=stored.sequence,
            work_s=booking.work_s,
            hashes=pack_hashes(case.hashes),
        )
        await self._publisher.send(subjects.routed(self._name), routed)
        return stored.sequence

    def _remember(self, case: _Case, decision: Decision, sequence: int) -> None:
        self._decisions.pop(case.request.request_id, None)
        self._decisions[case.request.request_id] = (case, decision, (decision.lane, sequence))
        if len(self._decisions) > REMEMBERED_DECISIONS:
            self._decisions.popitem(last=False)
        if case.request.session:
            self._session_lanes[session_key(case.request)] = decision.lane
            self._session_lanes.move_to_end(session_key(case.request))
            if len(self._session_lanes) > REMEMBERED_DECISIONS:
                self._session_lanes.popitem(last=False)

    def _explanation(self, case: _Case, decision: Decision) -> Explanation:
        by_score = sorted(case.choice, key=lambda candidate: decision.scores.get(candidate.lane, float("inf")))
        return Explanation(
            router=self._name,
            request_id=case.request.request_id,
            policy=self._policy_name,
            lane=decision.lane,
            reason=decision.reason,
            predicted_cached_tokens=case.query.cached_tokens(decision.lane),
            considered=[
                ConsideredLane(
                    lane=candidate.lane,
                    role=candidate.role,
                    score=decision.scores.get(candidate.lane, 0.0),
                    words=describe(candidate, case.query, case.looked_s),
                )
                for candidate in by_score
            ],
        )

    # -- what is known ------------------------------------------------------------------------------------------------

    async def _model_card(self, model: str) -> ModelCard:
        card = self._models.get(model) or await self._catalogue.get(model)
        if card is None:
            known = ", ".join(sorted(card.model for card in await self._catalogue.all())) or "none yet"
            raise UnknownModel(f"no model is called {model!r} here; there are: {known}")
        self._models[model] = card
        return card

    def _on_load(self, message: RawMessage) -> None:
        try:
            load = decode(message.data, WorkerLoad)
        except Undecodable as error:
            log.warning("a load report that cannot be read: %s", error)
            return
        lane = f"{load.worker}-{load.incarnation}"
        before = self._fleet.loads.get(lane)
        if before is None or load.fetched_sequence > before.fetched_sequence:
            self._full_until_s.clear()
        self._fleet.loaded(lane, load, time.monotonic())
        self._alarm.look(lane, load)
        self._ledger.fetched(lane, load.fetched_sequence)
        if self._kept:
            self._plan_soon(LEAST_PAUSE_S)
        if load.prefill_left_s <= IDLE_S and (before is None or before != load):
            self.on_idle()

    def _on_routed(self, message: RawMessage) -> None:
        try:
            routed = decode(message.data, Routed)
            hashes = unpack_hashes(routed.hashes)
        except Undecodable as error:
            log.warning("another router's decision that cannot be read: %s", error)
            return
        if routed.router != self._name and routed.lane in self._living_lanes():
            self._ledger.stored(self._ledger.book(routed.request_id, routed.lane, routed.work_s), routed.sequence)
            self._index.predict(routed.lane, hashes, time.monotonic())

    def _living_lanes(self) -> set[str]:
        return {card.lane for card in self._registry.workers.values()}

    def _forget_the_dead(self) -> None:
        lanes = self._living_lanes()
        for gone in (self._fleet.loads.keys() | self._ledger.lanes) - lanes:
            last = self._fleet.forget(gone)
            if last is not None:
                self._last_fetched[gone] = last.fetched_sequence
            self._ledger.forget(gone)
            self._alarm.forget(gone)
        while len(self._last_fetched) > REMEMBERED_LANES:
            self._last_fetched.popitem(last=False)
        self._full_until_s.clear()
        self._models.clear()  # a new worker may have announced another limit


def session_key(request: InferenceRequest) -> str:
    """Sessions are their tenant's own: equal names under other models or salts are other sessions."""
    return f"{len(request.model)}:{request.model}{len(request.cache_salt)}:{request.cache_salt}{request.session}" if request.session else ""
