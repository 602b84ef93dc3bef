"""The router's loop: a request in, a policy's decision, a job on one worker's queue out.

Reads `jw.requests.<model>.<class>`, worker cards, `jw.load.<worker>` and what other routers tell on `jw.routed.<router>`; writes
`jw.prefill.<worker>-<incarnation>`, or a failed, cancelled or expired terminal. Promises: a request is acknowledged only when its
job is stored, or its terminal is.
"""

import logging
import time
from collections import OrderedDict
from dataclasses import dataclass

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
from .fleet import Candidate, candidates
from .lane_ledger import Booking, LaneLedger
from .policies import Decision, Policy, Query, describe
from .prefix_index import PrefixIndex

log = logging.getLogger(__name__)

REMEMBERED_DECISIONS = 10_000
REMEMBERED_LANES = 1_000
INTERACTIVE_PER_BATCH = 16
"""The small share of batch: one request for so many interactive ones, even when no worker is free."""


@dataclass(frozen=True)
class _Case:
    """One request with all that a policy decides on."""

    request: InferenceRequest
    hashes: list[int]
    query: Query
    choice: tuple[Candidate, ...]


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
        self._direct = direct
        self._ledger = LaneLedger()
        self._slots = slots
        self._in_hand = self._interactive_since_batch = 0
        self._session_lanes: OrderedDict[str, str] = OrderedDict()
        self._loads: dict[str, WorkerLoad] = {}
        self._last_fetched: OrderedDict[str, int] = OrderedDict()
        self._models: dict[str, ModelCard] = {}
        self._decisions: OrderedDict[str, tuple[_Case, Decision]] = OrderedDict()
        registry.on_change(self._forget_the_dead)

    async def listen(self, bus: Bus) -> None:
        await bus.subscribe(subjects.LOADS, self._on_load)
        await bus.subscribe(subjects.ROUTED, self._on_routed)

    def room(self) -> int:
        return self._slots - self._in_hand

    def batch_room(self) -> int:
        """Batch requests go only where one can start at once, so that no interactive one finds a queue of them before it.

        They get a small share all the same: one for every so many interactive ones, however busy the workers are.
        """
        startable = sum(max(0, worker.free_slots - worker.queued_requests) for choice in self.fleets().values() for worker in choice)
        due = self._interactive_since_batch // INTERACTIVE_PER_BATCH
        return min(self._slots - self._slots // 8 - self._in_hand, max(startable, due))

    async def handle(self, delivery: Delivery[InferenceRequest]) -> None:
        request = delivery.message
        self._in_hand += 1
        self._interactive_since_batch = self._interactive_since_batch + 1 if request.priority_class == "interactive" else 0
        try:
            self._in_flight.check(request, "routing")
            card = await self._model_card(request.model)
            admit(request, card)
            await self._route(self._case(request, card))
        except RequestEnded as ending:
            await self._endings.ended_early(request, ending)
        finally:
            self._in_hand -= 1

    async def fail(self, delivery: Delivery[InferenceRequest], error: JetwakeError) -> None:
        await self._endings.failed(delivery.message, error)

    async def explain(self, request: InferenceRequest) -> Explanation:
        """Where this request would go now; nothing is sent. Raises what refusing it would raise, and NoWorker."""
        card = await self._model_card(request.model)
        admit(request, card)
        case = self._case(request, card)
        return self._explanation(case, self._policy.choose(case.choice, case.query))

    def explain_decided(self, request_id: str) -> Explanation | None:
        """Where this request went, while it is remembered; None when this router did not decide it."""
        decided = self._decisions.get(request_id)
        return None if decided is None else self._explanation(*decided)

    # -- what waits, for `rebalance` --------------------------------------------------------------------------------------

    def fleets(self) -> dict[str, tuple[Candidate, ...]]:
        """By model: the workers there are."""
        models = {card.model for card in self._registry.workers.values()}
        return {model: candidates(model, self._registry.workers, self._loads, self._ledger) for model in models}

    def queued(self, lane: str) -> list[Booking]:
        return self._ledger.queued(lane)

    def decided(self, request_id: str) -> InferenceRequest | None:
        """The request as this router last routed it, while that is remembered."""
        decided = self._decisions.get(request_id)
        return decided[0].request if decided else None

    def had_taken(self, lane: str, sequence: int) -> bool:
        """Whether a lane that is gone had fetched this far. True when its last word was not heard: that errs to the safe side."""
        return sequence <= self._last_fetched.get(lane, sequence)

    def withdraw(self, booking: Booking) -> None:
        self._ledger.withdraw(booking)

    # -- deciding -----------------------------------------------------------------------------------------------------

    def _case(self, request: InferenceRequest, card: ModelCard) -> _Case:
        """Raises NoWorker when nobody can take it now: the request stays in its queue."""
        choice = candidates(request.model, self._registry.workers, self._loads, self._ledger, direct=self._direct)
        if not choice:
            raise NoWorker(f"no worker for {request.model} is ready with a compatible peer")
        root = root_hash(request.model, request.lora, request.cache_salt)
        hashes = block_hashes(request.prompt_tokens, card.block_size_tokens, root)
        matches = self._index.match(hashes, time.monotonic())
        query = Query(
            request.request_id,
            request.prompt_length_tokens,
            card.block_size_tokens,
            matches,
            self._session_lanes.get(session_key(request), ""),
        )
        return _Case(request, hashes, query, choice)

    async def _route(self, case: _Case) -> None:
        choice = case.choice
        while choice:
            decision = self._policy.choose(choice, case.query)
            chosen = next(candidate for candidate in choice if candidate.lane == decision.lane)
            try:
                await self._send(case, chosen, decision)
            except StreamFull:
                choice = tuple(candidate for candidate in choice if candidate.lane != decision.lane)
            else:
                self._remember(case, decision)
                return
        raise Overloaded(f"the queues of all workers for {case.request.model} are full")

    async def _send(self, case: _Case, chosen: Candidate, decision: Decision) -> None:
        """Booked and predicted before the first await: decisions made meanwhile must count it."""
        request, lane = case.request, chosen.lane
        cached_tokens = case.query.cached_tokens(lane)
        booking = self._ledger.book(request.request_id, lane, chosen.timing.seconds(request.prompt_length_tokens - cached_tokens))
        job = PrefillJob(
            request=request,
            router=self._name,
            reason=decision.reason,
            predicted_cached_tokens=cached_tokens,
            routed_ns=self._clock.now_ns(),
        )
        self._index.predict(lane, case.hashes, time.monotonic())
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

    def _remember(self, case: _Case, decision: Decision) -> None:
        self._decisions.pop(case.request.request_id, None)
        self._decisions[case.request.request_id] = (case, decision)
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
                    words=describe(candidate, case.query),
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
        self._loads[lane] = load
        self._ledger.fetched(lane, load.fetched_sequence)

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
        for gone in (self._loads.keys() | self._ledger.lanes) - lanes:
            last = self._loads.pop(gone, None)
            if last is not None:
                self._last_fetched[gone] = last.fetched_sequence
            self._ledger.forget(gone)
        while len(self._last_fetched) > REMEMBERED_LANES:
            self._last_fetched.popitem(last=False)
        self._models.clear()  # a new worker may have announced another limit


def session_key(request: InferenceRequest) -> str:
    """Sessions are their tenant's own: equal names under other models or salts are other sessions."""
    return f"{len(request.model)}:{request.model}{len(request.cache_salt)}:{request.cache_salt}{request.session}" if request.session else ""
