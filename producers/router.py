"""The router's loop: a request in, a policy's decision, a job on one worker's queue out.

Reads `jw.requests.<model>.<class>`, worker cards, `jw.load.<worker>` and what other routers tell on `jw.routed.<router>`; writes
`jw.prefill.<worker>-<incarnation>`, or a failed, cancelled or expired terminal. Promises: a request is acknowledged only when its
job is stored, or its terminal is.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace

from ..pipeline import instruments, tracing
from ..pipeline.catalogue import ModelCatalogue
from ..pipeline.clock import ServerClock
from ..pipeline.connection import Bus, RawMessage
from ..pipeline.consume import Delivery
from ..pipeline.endings import Endings
from ..pipeline.in_flight import InFlight
from ..pipeline.publish import Publisher
from ..pipeline.registry import Registry
from ..schemas import signals, subjects
from ..schemas.blocks import block_hashes, pack_hashes, root_hash, unpack_hashes
from ..schemas.codec import decode
from ..schemas.errors import InvalidRequest, JetwakeError, NoWorker, Overloaded, RequestEnded, StreamFull, Undecodable, UnknownModel
from ..schemas.headers import request_headers
from ..schemas.prefill import PrefillJob
from ..schemas.requests import InferenceRequest
from ..schemas.routing import ConsideredLane, Explanation, Routed, RouterHere
from ..schemas.workers import ModelCard, WorkerLoad
from .admission import admit
from .batch_share import IDLE_S, LATELY_S, decode_has_room, startable
from .decision_signals import decision_facts, traced
from .delivery_time import DeliveryTime
from .fleet import Candidate, Fleet
from .lane_ledger import Booking, LaneLedger
from .policies import Decision, KvAware, Policy, Query, describe
from .prefix_index import PrefixIndex
from .silent_workers import SilenceAlarm
from .waiting_room import Case, Turn, WaitingRoom

log = logging.getLogger(__name__)

REMEMBERED_DECISIONS = 10_000
REMEMBERED_LANES = 1_000
HOLD_S = 1.0
"""How long full queues are believed to be full when no worker says that it took something."""
INTERACTIVE_PER_BATCH = 16
"""The small share of batch: one request for so many interactive ones, even when no worker is free."""


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
        self._own_routed = subjects.routed(name)
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
        self._models: dict[str, ModelCard] = {}
        self._decisions: OrderedDict[str, tuple[Case, Decision, tuple[str, int]]] = OrderedDict()
        self.on_idle: Callable[[], None] = lambda: None  # called when a worker may have room for batch
        self._delivery = DeliveryTime()
        self._waiting_room = (
            WaitingRoom(policy, index, self._candidates, self._book, self._ledger.withdraw, self._delivery)
            if isinstance(policy, KvAware)
            else None
        )
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
        request = traced(delivery.message, delivery.headers).stamped(taken_ns=self._clock.now_ns())
        is_batch = request.priority_class == "batch"
        self._in_hand += 1
        self._batch_in_hand += is_batch
        instruments.show(signals.ROUTER_IN_HAND, self._in_hand)
        self._interactive_since_batch = 0 if is_batch else self._interactive_since_batch + 1
        if not is_batch:
            self._interactive_s = time.monotonic()
        try:
            put_ns = request.times.again_ns or request.submitted_ns
            with tracing.Leg(signals.ROUTE_SPAN, request, self._name, self._clock.now_ns, put_ns) as leg:
                if request.attempt == 1 and subjects.is_again(delivery.subject):
                    raise InvalidRequest(
                        "a request that is handed back must be a later attempt: whoever holds no request may not send one so"
                    )
                self._in_flight.check(request, "routing")
                card = await self._model_card(request.model)
                admit(request, card)
                await self._route(self._case(request, card), leg)
        except RequestEnded as ending:
            await self._endings.ended_early(request, ending)
        finally:
            self._in_hand -= 1
            self._batch_in_hand -= is_batch
            instruments.show(signals.ROUTER_IN_HAND, self._in_hand)

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

    def here(self) -> RouterHere:
        kept = self._waiting_room.kept if self._waiting_room is not None else 0
        return RouterHere(router=self._name, policy=self._policy_name, in_hand=self._in_hand, kept=kept, index_blocks=self._index.blocks)

    def loads(self) -> Mapping[str, WorkerLoad]:
        """By lane: what each worker told last."""
        return self._fleet.loads

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

    def _case(self, request: InferenceRequest, card: ModelCard) -> Case:
        """Raises NoWorker when nobody can take it now: the request stays in its queue."""
        choice = self._candidates(request.model)
        if not choice:
            raise NoWorker(f"no worker for {request.model} is ready with a compatible peer")
        if request.failed_workers:
            choice = tuple(candidate for candidate in choice if candidate.worker not in request.failed_workers) or choice
        began_s = time.perf_counter()
        root = root_hash(request.model, request.lora, request.cache_salt)
        hashes = block_hashes(request.prompt_tokens, card.block_size_tokens, root)
        query = Query(
            request.request_id,
            request.prompt_length_tokens,
            card.block_size_tokens,
            self._index.match(hashes, time.monotonic()),
            self._session_lanes.get(session_key(request), ""),
        )
        instruments.record(signals.ROUTER_LOOKUP_DURATION, time.perf_counter() - began_s)
        return Case(request, hashes, query, choice, time.monotonic())

    def _candidates(self, model: str) -> tuple[Candidate, ...]:
        return self._fleet.candidates(model, self._registry.workers, direct=self._direct)

    async def _route(self, case: Case, leg: tracing.Leg) -> None:
        turn = await self._turn(case)
        case, decision, booking = turn.case, turn.decision, turn.booking
        try:
            self._in_flight.check(case.request, "routing")  # again: it may have been kept
        except RequestEnded:
            self._ledger.withdraw(booking)
            raise
        choice = case.choice
        while True:
            case = replace(case, request=case.request.stamped(routed_ns=self._clock.now_ns()))
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
                self._tell(case, decision, leg)
                return
        self._full_until_s[case.request.model] = time.monotonic() + HOLD_S
        raise Overloaded(f"the queues of all workers for {case.request.model} are full")

    async def _turn(self, case: Case) -> Turn:
        """At once, or when the policy that keeps requests back lets this one go."""
        if self._waiting_room is not None:
            return await self._waiting_room.turn(case)
        decision = self._policy.choose(case.choice, case.query, time.monotonic())
        return Turn(case, decision, self._book(case, decision))

    def _book(self, case: Case, decision: Decision) -> Booking:
        lane = decision.lane
        chosen = next(candidate for candidate in case.choice if candidate.lane == lane)
        booking = self._ledger.book(case.request.request_id, lane, chosen.prefill_s(case.query), time.monotonic())
        self._index.predict(lane, case.hashes, time.monotonic())
        return booking

    async def _send(self, case: Case, decision: Decision, booking: Booking) -> int:
        """The job's place in its queue. It is booked and predicted: decisions made meanwhile count it."""
        request, lane = case.request, decision.lane
        job = PrefillJob(
            request=request,
            router=self._name,
            reason=decision.reason,
            predicted_cached_tokens=case.query.cached_tokens(lane),
        )
        began_s = time.monotonic()
        try:
            stored = await self._publisher.store(
                subjects.prefill(lane),
                job,
                message_id=subjects.message_id(request.request_id, "prefill", request.attempt),
                headers=request_headers(request),
            )
        except BaseException:
            self._ledger.withdraw(booking)
            raise
        self._delivery.measured(time.monotonic() - began_s)
        self._ledger.stored(booking, stored.sequence)
        routed = Routed(
            router=self._name,
            request_id=request.request_id,
            lane=lane,
            sequence=stored.sequence,
            work_s=booking.work_s,
            hashes=pack_hashes(case.hashes),
        )
        await self._publisher.send(self._own_routed, routed)
        return stored.sequence

    def _remember(self, case: Case, decision: Decision, sequence: int) -> None:
        self._decisions.pop(case.request.request_id, None)
        self._decisions[case.request.request_id] = (case, decision, (decision.lane, sequence))
        if len(self._decisions) > REMEMBERED_DECISIONS:
            self._decisions.popitem(last=False)
        if case.request.session:
            self._session_lanes[session_key(case.request)] = decision.lane
            self._session_lanes.move_to_end(session_key(case.request))
            if len(self._session_lanes) > REMEMBERED_DECISIONS:
                self._session_lanes.popitem(last=False)

    def _tell(self, case: Case, decision: Decision, leg: tracing.Leg) -> None:
        model = case.request.model
        instruments.add(signals.ROUTER_DECISIONS, 1, self._policy_name, model)
        instruments.record_stages(model, case.request.moments, "accept", "earlier_attempts", "queue", "routing")
        if leg.wanted:
            leg.events.append((signals.DECISION_EVENT, decision_facts(self._explanation(case, decision))))

    def _explanation(self, case: Case, decision: Decision) -> Explanation:
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
        changes = self._fleet.loaded(lane, load, time.monotonic())
        self._alarm.look(lane, load)
        self._ledger.fetched(lane, load.fetched_sequence)
        if changes and self._waiting_room is not None:
            self._waiting_room.look()
        if load.prefill_left_s <= IDLE_S and (before is None or before != load):
            self.on_idle()

    def _on_routed(self, message: RawMessage) -> None:
        if message.subject == self._own_routed:
            return
        try:
            routed = decode(message.data, Routed)
            hashes = unpack_hashes(routed.hashes)
        except Undecodable as error:
            log.warning("another router's decision that cannot be read: %s", error)
            return
        if routed.lane in self._living_lanes():
            now_s = time.monotonic()
            self._ledger.stored(self._ledger.book(routed.request_id, routed.lane, routed.work_s, now_s), routed.sequence)
            self._index.predict(routed.lane, hashes, now_s)

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
        if self._waiting_room is not None:
            self._waiting_room.look()


def session_key(request: InferenceRequest) -> str:
    """Sessions are their tenant's own: equal names under other models or salts are other sessions."""
    return f"{len(request.model)}:{request.model}{len(request.cache_salt)}:{request.cache_salt}{request.session}" if request.session else ""
