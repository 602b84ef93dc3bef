"""The decode worker's loop: claim a handoff when it fits, pull its KV cache, stream the tokens, end the request.

Reads `jw.handoff.<pool>.<domain>`; writes a claim (`jw.claims.<request>.<attempt>`), token chunks, one terminal, or the request again with a
higher attempt. Promises: a KV reference is pulled at most once (a second delivery, a stale or a failed one leads to a fresh prefill),
and its blocks are released whenever they are not pulled.
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import aclosing

from ..pipeline import instruments, tracing
from ..pipeline.clock import ServerClock
from ..pipeline.consume import Delivery
from ..pipeline.endings import Endings
from ..pipeline.in_flight import InFlight
from ..pipeline.publish import Publisher
from ..pipeline.terminals import Terminals
from ..schemas import signals, subjects
from ..schemas.decode import KvHandoff
from ..schemas.errors import HandoffRefused, HandoffStale, JetwakeError, PullFailed, RequestEnded
from ..schemas.prefill import ReleaseKv
from ..schemas.timeline import moments
from ..schemas.tokens import token_count
from ..schemas.workers import WorkerCard
from .answer import Answer
from .block_ledger import BlockLedger
from .claims import Claims
from .continuing import Continuing
from .counting import answer_facts, count_transfer
from .decode_seats import DecodeLoad
from .engine import Engine, EngineInfo
from .legs import leg_of
from .pull_health import PullHealth
from .workload import Workload

log = logging.getLogger(__name__)

HOLD_MARGIN_NS = 250_000_000
"""Two processes read the broker's time this well, and better."""


class DecodeConsumer:
    """`alive` gives the live worker cards: a handoff from an incarnation that is gone is not worth a pull."""

    def __init__(
        self,
        engine: Engine,
        info: EngineInfo,
        card: WorkerCard,
        *,
        publisher: Publisher,
        terminals: Terminals,
        clock: ServerClock,
        in_flight: InFlight,
        work: Workload,
        ledger: BlockLedger,
        alive: Callable[[], Mapping[str, WorkerCard]],
        claims: Claims,
        continuing: Continuing,
    ) -> None:
        self._work = work
        self._engine = engine
        self._info = info
        self._card = card
        self._publisher = publisher
        self._terminals = terminals
        self._clock = clock
        self._in_flight = in_flight
        self._alive = alive
        self._claims = claims
        self._endings = Endings(publisher, terminals)
        self._ledger = ledger
        self._continuing = continuing
        self._pulls = PullHealth()

    def room(self) -> int:
        return min(self._ledger.claimable(), self._work.free_slots())

    def load(self) -> DecodeLoad:
        work, ledger = self._work, self._ledger
        return DecodeLoad(ledger.promised_blocks(), self._info.capacity_blocks, work.in_hand, work.slots, ledger.next_blocks())

    async def handle(self, delivery: Delivery[KvHandoff]) -> None:
        handoff = delivery.message
        request = handoff.request
        if self._continuing.is_done(request, "decode"):
            return
        answer = Answer(self._publisher, request, handoff.first_tokens)
        async with self._work.holding(request):
            try:
                with tracing.Leg(signals.DECODE_SPAN, request, self._card.worker, self._clock.now_ns, request.times.prefilled_ns) as leg:
                    try:
                        await self._decode(delivery, answer)
                    finally:
                        leg.attributes |= answer_facts(answer)
                        self._tell(answer)
                await self._terminals.end(
                    answer.request, answer.finished(handoff.prefill_worker, self._card.worker, handoff.predicted_cached_tokens)
                )
                self._continuing.done(request, "decode")
            except RequestEnded as ending:
                await self._release(handoff, answer, str(ending))
                await self._endings.ended_early(answer.request, ending)
            except (PullFailed, HandoffRefused) as error:
                if isinstance(error, PullFailed):
                    self._note_failed_pull(handoff)
                    claimed_ns, now_ns = answer.request.times.claimed_ns, self._clock.now_ns()
                    tracing.record(signals.TRANSFER_SPAN, request, self._card.worker, claimed_ns or now_ns, now_ns, error=error)
                await self._release(handoff, answer, str(error))
                await self._endings.again(answer.request, error)

    async def again(self, delivery: Delivery[KvHandoff], error: JetwakeError) -> None:
        await self._order_release(delivery.message, str(error))
        await self._endings.again(delivery.message.request, error, worker=self._card.worker)

    async def fail(self, delivery: Delivery[KvHandoff], error: JetwakeError) -> None:
        handoff = delivery.message
        await self._order_release(handoff, str(error))
        await self._endings.failed(handoff.request, error)

    async def _decode(self, delivery: Delivery[KvHandoff], answer: Answer) -> None:
        handoff, request = delivery.message, delivery.message.request
        async with self._in_flight.guard(request, "decode"):
            await self._validate(delivery)
            need_blocks = BlockLedger.need_blocks(request, self._info.model.max_model_len_tokens, handoff.kv.block_size_tokens)
            async with self._ledger.reserve(need_blocks):
                self._check_kept(handoff)  # again: waiting for room takes time
                async with self._claims.claimed(handoff):
                    answer.stamp(claimed_ns=self._clock.now_ns())
                    self._continuing.begin(request, "decode")
                    await self._generate(handoff, answer)

    def _tell(self, answer: Answer) -> None:
        """What is known of the leg, however it ended."""
        request, last = answer.request, answer.last
        model, times = request.model, request.times
        at = moments(times, request.submitted_ns, self._clock.now_ns())
        instruments.add(signals.ANSWER_TOKENS, max(0, token_count(answer.tokens) - answer.given_tokens), model)
        if last is None or last.finish_reason is None:
            return
        instruments.record_stages(model, at, "handoff_wait", "transfer", "first_step", "generation")
        count_transfer(model, last.kv_bytes, last.transfer_s)
        if times.pulled_ns:
            facts: tracing.Attributes = {signals.TRANSFER_SIZE: last.kv_bytes, signals.TRANSFER_NIXL_S: last.transfer_s}
            tracing.record(signals.TRANSFER_SPAN, request, self._card.worker, times.claimed_ns, times.pulled_ns, attributes=facts)

    async def _generate(self, handoff: KvHandoff, answer: Answer) -> None:
        leg = leg_of(handoff.request, kv=handoff.kv, forced_tokens=handoff.first_tokens)
        async with aclosing(self._engine.generate(leg)) as outputs, aclosing(answer):
            async for output in outputs:
                if answer.last is None:
                    self._check_kept(handoff)  # what was pulled from blocks that were free by then may be anybody's
                    self._pulls.went_well()
                had_new = answer.has_new
                await answer.add(output)
                if answer.has_new and not had_new:
                    answer.stamp(second_token_ns=self._clock.now_ns())
                if output.pulled_monotonic_ns and not answer.request.times.pulled_ns:
                    answer.stamp(pulled_ns=self._clock.at_ns(output.pulled_monotonic_ns))

    def _note_failed_pull(self, handoff: KvHandoff) -> None:
        """Where transfers do not work any more the worker ends, or its free slots would attract request after request."""
        instruments.add(signals.TRANSFER_FAILURES, 1, handoff.request.model)
        lanes = {card.lane for card in self._alive().values() if card.role == "prefill"}
        self._pulls.failed(f"{handoff.prefill_worker}-{handoff.prefill_incarnation}", lanes)
        if self._pulls.broken:
            log.error("%s: pulls fail one after the other: this engine's transfers do not work", self._card.lane)
            self._work.engine_dead.set()

    async def _validate(self, delivery: Delivery[KvHandoff]) -> None:
        """Raises HandoffRefused for a handoff that must not be pulled. The engine checks the block list itself."""
        handoff = delivery.message
        # The broker counts deliveries, too, that nobody got: an inbox was just left, a worker was slow. Claims tell, if all are known.
        if delivery.deliveries > 1 and not await self._claims.would_be_known(delivery.stored_ns):
            raise HandoffRefused("this handoff was delivered before: its blocks may be pulled or reused already")
        self._check_kept(handoff)
        owner = self._alive().get(handoff.prefill_worker)
        if owner is None or owner.incarnation != handoff.prefill_incarnation:
            raise HandoffStale(f"prefill worker {handoff.prefill_worker} of this handoff is gone")
        if owner.compatibility != self._card.compatibility:
            raise HandoffRefused(f"prefill worker {handoff.prefill_worker} is not compatible with {self._card.worker}")

    def _check_kept(self, handoff: KvHandoff) -> None:
        if self._clock.now_ns() >= handoff.hold_until_ns - HOLD_MARGIN_NS:
            raise HandoffStale("the prefill worker no longer keeps these blocks")

    async def _release(self, handoff: KvHandoff, answer: Answer, reason: str) -> None:
        """Tell the prefill worker that nobody will pull, unless the first output already shows that it was pulled."""
        if answer.last is None:
            await self._order_release(handoff, reason)

    async def _order_release(self, handoff: KvHandoff, reason: str) -> None:
        if not await self._claims.may_let_go(handoff):
            return
        order = ReleaseKv(request_id=handoff.request.request_id, engine_request_id=handoff.kv.engine_request_id, reason=reason[:200])
        await self._publisher.send(subjects.release(f"{handoff.prefill_worker}-{handoff.prefill_incarnation}"), order)
