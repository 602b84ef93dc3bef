"""The standing pull: takes messages of one durable consumer while its owner has room, decodes, handles and settles them.

Reads one JetStream consumer; writes acknowledgements, and dead letters for what cannot be processed. Promises: never asks for
more than `room()`; reports every held message each third of its ack wait; each message is handled in a task of its own and
reaches exactly one settlement; fetching goes on by itself after a reconnect, a restarted broker or a deleted consumer; what is
in hand when the loop is stopped or cancelled goes back to the queue.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ..schemas.codec import decode
from ..schemas.errors import BrokerUnavailable, BusError, JetwakeError, StreamMissing, Undecodable
from ..schemas.replies import DeadLetter, Failed
from ..schemas.streams import ConsumerSpec
from ..schemas.subjects import REQUEST_ID_HEADER
from .clock import Clock, WallClock
from .connection import Bus
from .fetching import StandingPull
from .jetstream import ACK, IN_PROGRESS, TERM, DeliveryFacts, delivery_facts, nak
from .publish import Publisher
from .raw import RawMessage
from .settle import NOT_NOW, Settlement, settlement
from .terminals import ReplyTarget, Terminals

logger = logging.getLogger(__name__)

M = TypeVar("M")
_ACK_AGAIN_S = 0.1
_MAX_EXCUSED = 10_000
_REPLY_TARGET = re.compile(r"([A-Za-z0-9_-]{1,96})\.([A-Za-z0-9_-]{1,96})\.([A-Za-z0-9_-]{1,96})")


@dataclass(frozen=True)
class Delivery(Generic[M]):
    """`deliveries`: 1 on the first, and what ended in "not now" here does not count. `stored_ns`: the broker's time of storing."""

    message: M
    subject: str
    deliveries: int
    stored_ns: int
    sequence: int
    headers: Mapping[str, str]


@dataclass(eq=False)
class _Held:
    """A fetched message until it is settled. A second delivery of it while it is held only renews `raw` and `facts`."""

    raw: RawMessage
    facts: DeliveryFacts
    begun: bool = False

    @property
    def identity(self) -> tuple[int, int]:
        return self.facts.sequence, self.facts.stored_ns  # a stream that was made anew counts from 1 again


class Consumer(Generic[M]):
    """`handle` returns or raises; how that settles the message is the table in `settle`. It must count the message into what
    `room` tells before its first await. `fail` tells the client that its request has failed; it runs before settling.
    """

    def __init__(  # the owner's four callbacks and names: what differs between the loops of a router, a prefill and a decode worker
        self,
        bus: Bus,
        publisher: Publisher,
        spec: ConsumerSpec,
        kind: Any,
        handle: Callable[[Delivery[M]], Awaitable[None]],
        room: Callable[[], int],
        fail: Callable[[Delivery[M], JetwakeError], Awaitable[None]],
        stage: str,
        worker: str,
        max_deliveries: int = 3,
        clock: Clock | None = None,
    ) -> None:
        self.spec = spec
        self._bus = bus
        self._kind = kind
        self._handle = handle
        self._room = room
        self._fail = fail
        self._stage = stage
        self._worker = worker
        self._max_deliveries = max_deliveries
        self._terminals = Terminals(bus, publisher, clock or WallClock())
        self._pull = StandingPull(bus, spec, self._free, self._take)
        self._held: dict[tuple[int, int], _Held] = {}
        self._unbegun = 0
        self._excused: dict[tuple[int, int], int] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._handlers: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()
        self._ended.set()
        self._grace_s = 0.0

    @property
    def in_hand(self) -> int:
        """Fetched and not yet settled."""
        return len(self._held)

    @property
    def fetching(self) -> bool:
        """Whether the broker may send a message at this moment."""
        return self._pull.outstanding > 0 and self._bus.connected

    def room_changed(self) -> None:
        """To be called when `room()` may say something new."""
        self._pull.reconsider()

    # -- the loop ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until `stop`, or until cancelled: then everything in hand is handed back."""
        self._ended.clear()
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                try:
                    fetching = tasks.create_task(self._pull.run(), name=f"{self.spec.durable}-fetch")
                    reporting = tasks.create_task(self._report_progress(), name=f"{self.spec.durable}-progress")
                    await self._stopping.wait()
                    fetching.cancel()
                    await asyncio.wait([fetching])
                    await self._finish_handlers()
                    reporting.cancel()
                finally:
                    self._tasks = None
        finally:
            await self._hand_back(list(self._held.values()))
            self._ended.set()

    async def stop(self, grace_s: float) -> None:
        """Stop fetching, hand back what is not begun, give the rest `grace_s` to end, then cancel it and hand it back."""
        self._grace_s = grace_s
        self._stopping.set()
        await self._ended.wait()

    async def _finish_handlers(self) -> None:
        if self._handlers:
            await asyncio.wait(self._handlers, timeout=self._grace_s)
        if self._handlers:
            logger.warning("%s: %d messages not done within %g s go back", self.spec.durable, len(self._handlers), self._grace_s)
            for task in self._handlers:
                task.cancel()
            await asyncio.wait(self._handlers)

    async def _report_progress(self) -> None:
        while True:
            await asyncio.sleep(self.spec.ack_wait_s / 3)
            for held in list(self._held.values()) if self._bus.connected else ():
                with suppress(BusError):  # cut off at this moment: the next report comes soon
                    await self._bus.publish(held.raw.reply, IN_PROGRESS)

    def _free(self) -> int:
        """What may be asked for: the owner's room less what has arrived and is not yet counted by it."""
        return self._room() - self._unbegun

    # -- one message ------------------------------------------------------------------------------------------------

    def _take(self, raw: RawMessage) -> None:
        """A message has arrived (called in the loop, so the handler starts with its next turn)."""
        held = _Held(raw, delivery_facts(raw.reply))
        again = self._held.get(held.identity)
        if again is not None:  # we were silent for too long, or the broker was away: settle the newest delivery of it
            again.raw, again.facts = held.raw, held.facts
            return
        self._held[held.identity] = held
        self._unbegun += 1
        if self._tasks is None:
            return  # run() is ending, and hands back what is held
        task = self._tasks.create_task(self._process(held), name=f"{self.spec.durable}-{held.facts.sequence}")
        self._handlers.add(task)
        task.add_done_callback(self._handlers.discard)

    async def _process(self, held: _Held) -> None:
        if self._stopping.is_set() or self._room() <= 0:  # arrived while its pull was being taken back
            self._excuse(held)
            await self._hand_back([held])
            return
        held.begun = True
        self._unbegun -= 1
        try:
            outcome = await _outcome(self._handled(held))
            self._pull.reconsider()  # the slot is free now; settling need not be waited for
            problem = await _outcome(self._settle(held, outcome))
        except asyncio.CancelledError:
            await self._hand_back([held])
            raise
        if problem is not None:
            text = "%s: message %d could not be settled and comes again: %s"
            logger.error(text, self.spec.durable, held.facts.sequence, problem, exc_info=_unexpected(problem))
            await self._hand_back([held], delay_s=1.0)

    async def _handled(self, held: _Held) -> None:
        await self._handle(self._delivery(held))

    def _delivery(self, held: _Held) -> Delivery[M]:
        raw, facts = held.raw, held.facts
        message: M = decode(raw.data, self._kind)
        return Delivery(message, raw.subject, self._counted(held), facts.stored_ns, facts.sequence, raw.headers)

    def _counted(self, held: _Held) -> int:
        return max(1, held.facts.deliveries - self._excused.get(held.identity, 0))

    # -- settling ---------------------------------------------------------------------------------------------------

    async def _settle(self, held: _Held, error: Exception | None) -> None:
        if isinstance(error, Undecodable):
            await self._refuse(held, error)
            return
        verdict = settlement(error, self._counted(held), self._max_deliveries)
        if error is not None:
            self._log(held, verdict, error)
            if isinstance(error, NOT_NOW):
                self._excuse(held)
            if verdict.tell_client:
                ours = error if isinstance(error, JetwakeError) else JetwakeError(f"internal error: {error!r}")
                await self._fail(self._delivery(held), ours)
            if verdict.dead_letter:
                await self._terminals.dead_letter(self._letter(held, error))
        await self._answer(held, verdict)

    async def _answer(self, held: _Held, verdict: Settlement) -> None:
        if verdict.kind == "nak":
            await self._hand_back([held], verdict.delay_s)
            return
        try:
            await self._confirmed(held, ACK if verdict.kind == "ack" else TERM)
        finally:
            self._excused.pop(held.identity, None)
            self._forget(held)

    async def _confirmed(self, held: _Held, word: bytes) -> None:
        """The broker's word that it took our settlement: the only way to learn that the consumer was taken from us."""
        clock, patience_s = asyncio.get_running_loop().time, self._bus.settings.publish_deadline_s
        deadline = clock() + patience_s
        while True:
            try:
                await self._bus.request(held.raw.reply, word)
                return
            except StreamMissing:
                logger.warning("%s: the consumer is gone; message %d now belongs to others", self.spec.durable, held.facts.sequence)
                return
            except BrokerUnavailable as error:
                if clock() >= deadline:
                    logger.warning("%s: message %d is done but will come again: %s", self.spec.durable, held.facts.sequence, error)
                    return
            await asyncio.sleep(_ACK_AGAIN_S)

    async def _refuse(self, held: _Held, error: Exception) -> None:
        """What cannot be decoded: kept for an operator, told to whoever its headers name, and taken off the queue."""
        logger.error("%s: message %d cannot be decoded: %s", self.spec.durable, held.facts.sequence, error)
        target = reply_target(held.raw.headers)
        await self._terminals.dead_letter(self._letter(held, error, target))
        if target is not None:
            failed = Failed(request_id=target.request_id, attempt=1, code=Undecodable.code, text=str(error))
            await self._terminals.end(target, failed)
        await self._answer(held, Settlement("term"))

    async def _hand_back(self, held: list[_Held], delay_s: float = 0.0) -> None:
        for each in held:
            self._forget(each)
            with suppress(BusError):  # down: then it comes back after its ack wait
                await self._bus.publish(each.raw.reply, nak(delay_s))

    def _forget(self, held: _Held) -> None:
        if self._held.pop(held.identity, None) is not None and not held.begun:
            self._unbegun -= 1
        self._pull.reconsider()

    def _excuse(self, held: _Held) -> None:
        """This delivery ended in "not now" and does not count. Only here: another worker counts it, which errs to the safe side."""
        if len(self._excused) >= _MAX_EXCUSED:
            self._excused.pop(next(iter(self._excused)))
        self._excused[held.identity] = self._excused.get(held.identity, 0) + 1

    def _letter(self, held: _Held, error: Exception, target: ReplyTarget | None = None) -> DeadLetter:
        target = target or reply_target(held.raw.headers)
        return DeadLetter(
            stage=self._stage, subject=held.raw.subject, payload=held.raw.data, deliveries=held.facts.deliveries, worker=self._worker,
            code=error.code if isinstance(error, JetwakeError) else JetwakeError.code, text=str(error) or repr(error),
            request_id=target.request_id if target else "",
        )  # fmt: skip

    def _log(self, held: _Held, verdict: Settlement, error: Exception) -> None:
        usual = isinstance(error, NOT_NOW) or verdict.kind == "ack"
        text = "%s: message %d, delivery %d: %s, because %s"
        facts = (self.spec.durable, held.facts.sequence, held.facts.deliveries, verdict.kind, error)
        logger.log(logging.INFO if usual else logging.WARNING, text, *facts, exc_info=_unexpected(error))


async def _outcome(work: Awaitable[None]) -> Exception | None:
    """How it ended: the loop's boundary, so that no message can end the loop. Being cancelled passes through."""
    task = asyncio.current_task()
    cancels = task.cancelling() if task else 0
    try:
        await work
    except asyncio.CancelledError:
        if task is None or task.cancelling() > cancels:
            raise
        return JetwakeError("the handler was cancelled from inside")  # a bug of the handler, not our shutting down
    except Exception as problem:  # noqa: BLE001  the one place: whatever a handler raises is settled by the table
        return problem
    return None


def _unexpected(error: Exception) -> Exception | None:
    """For the log: our own errors say all in their text, anything else is a bug and worth its traceback."""
    return None if isinstance(error, JetwakeError) else error


def reply_target(headers: Mapping[str, str]) -> ReplyTarget | None:
    """Whom the headers name as waiting for the reply, if they do."""
    match = _REPLY_TARGET.fullmatch(headers.get(REQUEST_ID_HEADER, ""))
    return ReplyTarget(*match.groups()) if match else None
