"""The prefill worker's loop: a job from this worker's queue in, first token to the client, handoff to the decode pool out.

Reads `jw.prefill.<worker>-<incarnation>` and `jw.release.<worker>-<incarnation>`; writes chunk 0, `jw.handoff.<pool>.<domain>` or
a terminal. Promises: blocks handed off stay readable until they are pulled, released, or `hold_s` has passed, and never longer.
"""

import asyncio
from dataclasses import dataclass

from ..pipeline import instruments
from ..pipeline.clock import ServerClock
from ..pipeline.consume import Delivery
from ..pipeline.endings import Endings
from ..pipeline.in_flight import InFlight
from ..pipeline.publish import Publisher
from ..pipeline.terminals import Terminals
from ..pipeline.tracing import Leg
from ..schemas import signals, subjects
from ..schemas.decode import KvHandoff, KvReference
from ..schemas.errors import AnswerDiverged, BrokerUnavailable, HandoffRefused, JetwakeError, RequestEnded
from ..schemas.headers import request_headers
from ..schemas.prefill import PrefillJob
from ..schemas.workers import WorkerCard
from .answer import Answer, finished
from .continuing import Continuing
from .counting import count_prefill, prompt_facts
from .engine import Engine, Prefilled
from .leases import HeldHandoffs
from .legs import leg_of
from .workload import Workload


@dataclass(frozen=True)
class PrefillLimits:
    """`held_blocks`: stop fetching while more blocks than this wait to be pulled. `hold_s`: how long a handoff may wait unclaimed."""

    held_blocks: int
    hold_s: float = 120.0


class PrefillConsumer:
    def __init__(
        self,
        engine: Engine,
        card: WorkerCard,
        limits: PrefillLimits,
        *,
        publisher: Publisher,
        terminals: Terminals,
        clock: ServerClock,
        in_flight: InFlight,
        held: HeldHandoffs,
        work: Workload,
        continuing: Continuing,
    ) -> None:
        self._engine = engine
        self._card = card
        self._limits = limits
        self._publisher = publisher
        self._terminals = terminals
        self._clock = clock
        self._in_flight = in_flight
        self._held = held
        self._endings = Endings(publisher, terminals)
        self._work = work
        self._continuing = continuing

    def room(self) -> int:
        """How many more jobs fit now: free slots, none while too many blocks wait to be pulled."""
        if self._held.blocks >= self._limits.held_blocks:
            return 0
        return self._work.free_slots()

    async def handle(self, delivery: Delivery[PrefillJob]) -> None:
        job = delivery.message
        request = job.request.stamped(prefill_taken_ns=self._clock.now_ns())
        if self._continuing.is_done(request):
            return
        async with self._work.holding(request, delivery.sequence, job.new_tokens) as prefilling:
            try:
                with Leg(signals.PREFILL_SPAN, request, self._card.worker, self._clock.now_ns, request.times.routed_ns) as leg:
                    async with self._in_flight.guard(request, "prefill"):
                        self._continuing.begin(request)
                        given = (await self._continuing.given(request)).tokens
                        prefilled = await self._engine.prefill(leg_of(request, forced_tokens=given[:4]))
                    if leg.wanted:
                        leg.attributes |= prompt_facts(job, prefilled.cached_tokens)
                prefilling.measured(request.prompt_length_tokens - prefilled.cached_tokens)
                now_ns = self._clock.now_ns()
                request = request.stamped(prefilled_ns=now_ns, first_token_ns=request.times.first_token_ns or now_ns)
                count_prefill(job, prefilled.cached_tokens)
                if not given:
                    instruments.add(signals.ANSWER_TOKENS, 1, request.model)
                instruments.record_stages(request.model, request.moments, "prefill_queue", "prefill")
                await self._pass_on(job.model_copy(update={"request": request}), prefilled, given)
                self._continuing.done(request)
            except HandoffRefused as error:
                await self._endings.again(request, error, is_fault=delivery.deliveries > 1)
            except RequestEnded as ending:
                await self._endings.ended_early(request, ending)

    async def again(self, delivery: Delivery[PrefillJob], error: JetwakeError) -> None:
        await self._endings.again(delivery.message.request, error, worker=self._card.worker)

    async def fail(self, delivery: Delivery[PrefillJob], error: JetwakeError) -> None:
        await self._endings.failed(delivery.message.request, error)

    async def _pass_on(self, job: PrefillJob, prefilled: Prefilled, given: bytes) -> None:
        """`given`: what earlier attempts gave, which was sent already."""
        request = job.request
        is_end = prefilled.kv is None
        if given and (prefilled.first_tokens != given if is_end else not given.startswith(prefilled.first_tokens)):
            raise AnswerDiverged("the engine did not repeat the tokens that were given before")
        if not given:
            await Answer(self._publisher, request).send(0, prefilled.first_tokens, prefilled.logprobs, prefilled.cached_tokens)
        if prefilled.kv is not None:
            await self._hand_off(job, prefilled, prefilled.kv, given or prefilled.first_tokens)
        elif prefilled.finish_reason is not None:
            await self._terminals.end(
                request,
                finished(
                    request,
                    prefilled.first_tokens,
                    prefilled.finish_reason,
                    logprobs=prefilled.logprobs,
                    stop_reason=prefilled.stop_reason,
                    cached_tokens=prefilled.cached_tokens,
                    predicted_cached_tokens=job.predicted_cached_tokens,
                    prefill_worker=self._card.worker,
                ),
            )

    async def _hand_off(self, job: PrefillJob, prefilled: Prefilled, kv: KvReference, sent: bytes) -> None:
        request = job.request
        hold_until_ns = self._clock.now_ns() + int(self._limits.hold_s * 1e9)
        if request.deadline_ns:
            hold_until_ns = min(hold_until_ns, request.deadline_ns)
        handoff = KvHandoff(
            request=request,
            kv=kv,
            prefill_worker=self._card.worker,
            prefill_incarnation=self._card.incarnation,
            first_tokens=sent,
            first_logprobs=list(prefilled.logprobs),
            predicted_cached_tokens=job.predicted_cached_tokens,
            hold_until_ns=hold_until_ns,
        )
        self._held.add(handoff)
        try:
            stored = await self._publisher.store(
                subjects.handoff(self._card.pool, subjects.domain_token(self._card.domain)),
                handoff,
                message_id=subjects.message_id(request.request_id, "handoff", request.attempt),
                headers=request_headers(request),
            )
        except (BrokerUnavailable, asyncio.CancelledError):
            raise  # it may be stored, and be pulled: the lease book lets go of the blocks when they are, or nobody can want them any more
        except BaseException:  # nobody will ever pull what nobody was told of
            await self._held.release(kv.engine_request_id)
            raise
        if stored.duplicate and not stored.resent:
            # This job came twice and its first handoff is in the queue: the blocks of this second one have no reader.
            await self._held.release(kv.engine_request_id)
