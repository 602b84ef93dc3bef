"""Both legs in one engine: the loop of an aggregated worker, and of a decode worker for prompts too short to be worth a handoff.

The aggregated worker is the baseline that every measurement of disaggregation is compared with. Reads `jw.prefill.<worker>-<incarnation>`; writes token chunks and one terminal.
"""

from contextlib import aclosing

from ..pipeline import instruments
from ..pipeline.clock import ServerClock
from ..pipeline.consume import Delivery
from ..pipeline.endings import Endings
from ..pipeline.in_flight import InFlight
from ..pipeline.publish import Publisher
from ..pipeline.terminals import Terminals
from ..pipeline.tracing import Leg as Span
from ..schemas import signals
from ..schemas.errors import HandoffRefused, JetwakeError, RequestEnded
from ..schemas.prefill import PrefillJob
from ..schemas.requests import InferenceRequest
from ..schemas.timeline import moments
from ..schemas.tokens import token_count
from ..schemas.workers import WorkerCard
from .answer import Answer
from .block_ledger import BlockLedger
from .continuing import Continuing
from .counting import answer_facts, count_prefill, prompt_facts
from .engine import Engine, Leg
from .legs import leg_of
from .workload import Prefilling, Workload


class AggregatedConsumer:
    def __init__(
        self,
        engine: Engine,
        card: WorkerCard,
        *,
        publisher: Publisher,
        terminals: Terminals,
        clock: ServerClock,
        in_flight: InFlight,
        work: Workload,
        ledger: BlockLedger,
        continuing: Continuing,
    ) -> None:
        self._engine = engine
        self._card = card
        self._publisher = publisher
        self._terminals = terminals
        self._clock = clock
        self._in_flight = in_flight
        self._endings = Endings(publisher, terminals)
        self._work = work
        self._ledger = ledger
        self._continuing = continuing

    def room(self) -> int:
        return min(self._ledger.claimable(), self._work.free_slots())

    async def handle(self, delivery: Delivery[PrefillJob]) -> None:
        job = delivery.message
        request = job.request.stamped(prefill_taken_ns=self._clock.now_ns())
        if self._continuing.is_done(request):
            return
        answer = Answer(self._publisher, request)
        async with self._work.holding(request, delivery.sequence, job.new_tokens) as prefilling:
            try:
                with Span(signals.GENERATE_SPAN, request, self._card.worker, self._clock.now_ns, request.times.routed_ns) as span:
                    async with self._in_flight.guard(request, "generation"), self._ledger.reserve(self._need_blocks(request)):
                        self._continuing.begin(request)
                        given = (await self._continuing.given(request)).tokens
                        answer = Answer(self._publisher, request, given)
                        await self._generate(leg_of(request, forced_tokens=given), answer, prefilling)
                    self._tell(job, answer)
                    span.attributes |= prompt_facts(job, answer.last.cached_tokens if answer.last else 0) | answer_facts(answer)
                terminal = answer.finished(self._card.worker, self._card.worker, job.predicted_cached_tokens)
                await self._terminals.end(answer.request, terminal)
                self._continuing.done(request)
            except HandoffRefused as error:
                await self._endings.again(request, error, is_fault=delivery.deliveries > 1)
            except RequestEnded as ending:
                await self._endings.ended_early(answer.request, ending)

    def _tell(self, job: PrefillJob, answer: Answer) -> None:
        model = job.request.model
        count_prefill(job, answer.last.cached_tokens if answer.last is not None else 0)
        instruments.add(signals.ANSWER_TOKENS, max(0, token_count(answer.tokens) - answer.given_tokens), model)
        at = moments(answer.request.times, job.request.submitted_ns, self._clock.now_ns())
        instruments.record_stages(model, at, "prefill_queue", "prefill", "generation")

    async def again(self, delivery: Delivery[PrefillJob], error: JetwakeError) -> None:
        await self._endings.again(delivery.message.request, error, worker=self._card.worker)

    async def fail(self, delivery: Delivery[PrefillJob], error: JetwakeError) -> None:
        await self._endings.failed(delivery.message.request, error)

    def _need_blocks(self, request: InferenceRequest) -> int:
        block_size_tokens = self._card.compatibility.block_size_tokens
        return BlockLedger.need_blocks(request, self._card.max_model_len_tokens, block_size_tokens)

    async def _generate(self, leg: Leg, answer: Answer, prefilling: Prefilling) -> None:
        async with aclosing(self._engine.generate(leg)) as outputs, aclosing(answer):
            async for output in outputs:
                if answer.last is None:
                    prefilling.measured(token_count(leg.prompt_tokens) - output.cached_tokens)
                    now_ns = self._clock.now_ns()
                    answer.stamp(prefilled_ns=now_ns, first_token_ns=answer.request.times.first_token_ns or now_ns)
                await answer.add(output)
