"""The router's loop: a request in, a policy's decision, a job on one worker's queue out.

Reads `jw.requests.<model>.<class>`, worker cards and `jw.load.<worker>`; writes `jw.prefill.<worker>-<incarnation>` or a failed,
cancelled or expired terminal. Promises: a request is acknowledged only when its job is stored, or its terminal is.
"""

import logging

from ..pipeline.clock import ServerClock
from ..pipeline.connection import Bus, RawMessage
from ..pipeline.consume import Delivery
from ..pipeline.endings import Endings
from ..pipeline.in_flight import InFlight
from ..pipeline.publish import Publisher
from ..pipeline.registry import ModelCatalogue, Registry
from ..schemas import subjects
from ..schemas.codec import decode
from ..schemas.errors import JetwakeError, NoWorker, Overloaded, RequestEnded, StreamFull, Undecodable, UnknownModel
from ..schemas.prefill import PrefillJob
from ..schemas.requests import InferenceRequest
from ..schemas.workers import ModelCard, WorkerLoad
from .admission import admit
from .fleet import Candidate, candidates
from .policies import Policy, Query

log = logging.getLogger(__name__)


class Router:
    def __init__(
        self,
        name: str,
        policy: Policy,
        *,
        publisher: Publisher,
        endings: Endings,
        clock: ServerClock,
        in_flight: InFlight,
        registry: Registry,
        catalogue: ModelCatalogue,
        slots: int = 64,
    ) -> None:
        self._name = name
        self._policy = policy
        self._publisher = publisher
        self._endings = endings
        self._clock = clock
        self._in_flight = in_flight
        self._registry = registry
        self._catalogue = catalogue
        self._slots = slots
        self._in_hand = 0
        self._loads: dict[str, WorkerLoad] = {}
        self._routed: dict[str, int] = {}
        self._models: dict[str, ModelCard] = {}
        registry.on_change(self._forget_the_dead)

    async def listen(self, bus: Bus) -> None:
        await bus.subscribe(subjects.LOADS, self._on_load)

    def room(self) -> int:
        return self._slots - self._in_hand

    def batch_room(self) -> int:
        """Batch requests never take the last eighth of the slots, so that interactive ones need not wait for them."""
        return self._slots - self._slots // 8 - self._in_hand

    async def handle(self, delivery: Delivery[InferenceRequest]) -> None:
        request = delivery.message
        self._in_hand += 1
        try:
            self._in_flight.check(request, "routing")
            admit(request, await self._model_card(request.model))
            await self._route(request)
        except RequestEnded as ending:
            await self._endings.ended_early(request, ending)
        finally:
            self._in_hand -= 1

    async def fail(self, delivery: Delivery[InferenceRequest], error: JetwakeError) -> None:
        await self._endings.failed(delivery.message, error)

    async def _route(self, request: InferenceRequest) -> None:
        """Raises NoWorker or Overloaded when nobody can take it now: the request stays in its queue."""
        choice = candidates(request.model, self._registry.workers, self._loads, self._routed)
        if not choice:
            raise NoWorker(f"no worker for {request.model} is ready with a compatible peer")
        query = Query(request.request_id, request.prompt_length_tokens)
        while choice:
            decision = self._policy.choose(choice, query)
            job = PrefillJob(request=request, router=self._name, reason=decision.reason, routed_ns=self._clock.now_ns())
            try:
                await self._send(decision.lane, job)
            except StreamFull:
                choice = without(choice, decision.lane)
            else:
                return
        raise Overloaded(f"the queues of all workers for {request.model} are full")

    async def _send(self, lane: str, job: PrefillJob) -> None:
        self._routed[lane] = self._routed.get(lane, 0) + 1
        request = job.request
        try:
            await self._publisher.store(
                subjects.prefill(lane),
                job,
                message_id=subjects.message_id(request.request_id, "prefill", request.attempt),
                headers={subjects.REQUEST_ID_HEADER: subjects.reply_target(request.model, request.gateway, request.request_id)},
            )
        except BaseException:
            self._routed[lane] -= 1
            raise

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
        self._loads[f"{load.worker}-{load.incarnation}"] = load

    def _forget_the_dead(self) -> None:
        lanes = {card.lane for card in self._registry.workers.values()}
        for gone in (self._loads.keys() | self._routed.keys()) - lanes:
            self._loads.pop(gone, None)
            self._routed.pop(gone, None)
        self._models.clear()  # a new worker may have announced another limit


def without(choice: tuple[Candidate, ...], lane: str) -> tuple[Candidate, ...]:
    return tuple(candidate for candidate in choice if candidate.lane != lane)
