"""The standing pull: takes messages of one durable consumer while its owner has room, decodes, handles and settles them.

Reads one JetStream consumer; writes acknowledgements, and dead letters for what cannot be processed. Promises: never asks for
more than `room()`; reports every held message each fifth of its ack wait; each message is handled in a task of its own and
reaches exactly one settlement; fetching goes on by itself after a reconnect, a restarted broker or a deleted consumer; what is
in hand when the loop is stopped or cancelled goes back to the queue.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ..schemas.codec import decode
from ..schemas.errors import BusError, JetwakeError, Undecodable
from ..schemas.streams import ConsumerSpec
from .clock import Clock, WallClock
from .connection import Bus
from .fetching import StandingPull
from .jetstream import ACK, IN_PROGRESS, TERM, delivery_facts
from .publish import Publisher
from .raw import RawMessage
from .settle import NOT_NOW, Settlement, settlement
from .settling import Held, Settler, reply_target
from .terminals import Terminals

logger = logging.getLogger(__name__)

M = TypeVar("M")
ROOM_WAIT_S = 1.0
REPORTS = 5
"""In one ack wait: a process that got no turn for four of five loses nothing."""
_MAX_EXCUSED = 10_000


@dataclass(frozen=True)
class Delivery(Generic[M]):
    """`deliveries`: 1 on the first, and what ended in "not now" here does not count. `stored_ns`: the broker's time of storing."""

    message: M
    subject: str
    deliveries: int
    stored_ns: int
    sequence: int
    headers: Mapping[str, str]


class Consumer(Generic[M]):
    """`kind` is a message class, a union of them, or `bytes` for payloads of another make. `handle` returns or raises; how that settles the message is the table in `settle`. It must count the message into what
    `room` tells before its first await. `fail` tells the client that its request has failed; it runs before settling. `again`, where
    there is one, gives what went wrong here to another worker, instead of a second try here. `declare` is what to do when the
    consumer may be gone; without it, it is declared again.

    For an owner of several consumers with one room: `wanted` says what to ask for here, by priority, in place of all that `room` has;
    `moved` is called when what is asked for, or the room, may have changed.
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
        again: Callable[[Delivery[M], JetwakeError], Awaitable[None]] | None = None,
        declare: Callable[[], Awaitable[None]] | None = None,
        wanted: Callable[[], Mapping[int, int]] | None = None,
        moved: Callable[[], None] = lambda: None,
    ) -> None:
        self.spec = spec
        self._bus = bus
        self._kind = kind
        self._handle = handle
        self._room = room
        self._fail = fail
        self._again = again
        self._worker = worker
        self._max_deliveries = max_deliveries
        self._settler = Settler(bus, Terminals(bus, publisher, clock or WallClock()), spec, stage, worker)
        self._pull = StandingPull(bus, spec, wanted or self._all_room, self._take, declare, moved)
        self._held: dict[tuple[int, int], Held] = {}
        self.unbegun = 0
        self._moved = moved
        self._excused: dict[tuple[int, int], int] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._handlers: set[asyncio.Task[None]] = set()
        self._news = asyncio.Event()  # set and replaced when room may have changed: several may wait
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()
        self._ended.set()
        self._grace_s = 0.0

    @property
    def in_hand(self) -> int:
        """Fetched and not yet settled; of these, `unbegun` are not yet counted by the owner's room."""
        return len(self._held)

    @property
    def outstanding(self) -> int:
        """Asked for and not yet arrived: the gauge of credit."""
        return self._pull.outstanding

    @property
    def fetching(self) -> bool:
        """Whether the broker may send a message at this moment."""
        return self._pull.outstanding > 0 and self._bus.connected

    def room_changed(self) -> None:
        """To be called when `room()` may say something new."""
        self.reconsider()
        self._moved()

    def reconsider(self) -> None:
        """As `room_changed`, without a word to others with the same room."""
        self._pull.reconsider()
        self._news.set()
        self._news = asyncio.Event()

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
            for held in list(self._held.values()):
                await self._hand_back(held)
            self._ended.set()

    async def stop(self, grace_s: float) -> None:
        """Stop fetching, hand back what is not begun, give the rest `grace_s` to end, then cancel it and hand it back."""
        self._grace_s = grace_s
        self._stopping.set()
        self.room_changed()
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
            await asyncio.sleep(self.spec.ack_wait_s / REPORTS)
            for held in list(self._held.values()) if self._bus.connected else ():
                with suppress(BusError):  # cut off at this moment: the next report comes soon
                    await self._bus.publish(held.raw.reply, IN_PROGRESS)

    def _all_room(self) -> Mapping[int, int]:
        """What may be asked for: the owner's room less what has arrived and is not yet counted by it."""
        return {0: max(0, self._room() - self.unbegun)}

    # -- one message ------------------------------------------------------------------------------------------------

    def _take(self, raw: RawMessage) -> None:
        """A message has arrived (called in the loop, so the handler starts with its next turn)."""
        held = Held(raw, delivery_facts(raw.reply))
        again = self._held.get(held.identity)
        if again is not None:  # we were silent for too long, or the broker was away: settle the newest delivery of it
            again.raw, again.facts = held.raw, held.facts
            return
        self._held[held.identity] = held
        self.unbegun += 1
        if self._tasks is None:
            return  # run() is ending, and hands back what is held
        task = self._tasks.create_task(self._process(held), name=f"{self.spec.durable}-{held.facts.sequence}")
        self._handlers.add(task)
        task.add_done_callback(self._handlers.discard)

    async def _process(self, held: Held) -> None:
        try:
            if not await self._may_begin():
                self._excuse(held)
                await self._hand_back(held)
                return
            held.begun = True
            self.unbegun -= 1
            outcome = await _outcome(self._handled(held))
            self.room_changed()  # the slot is free now; settling need not be waited for
            problem = await _outcome(self._settle(held, outcome))
        except asyncio.CancelledError:
            await self._hand_back(held)
            raise
        if problem is not None:
            text = "%s: message %d could not be settled and comes again: %s"
            logger.error(text, self.spec.durable, held.facts.sequence, problem, exc_info=_unexpected(problem))
            await self._hand_back(held, delay_s=1.0)

    async def _may_begin(self) -> bool:
        """No when stopping. What arrived while its pull was being taken back waits a little for room: handing it back costs a delivery."""
        if self._room() <= 0 and not self._stopping.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(ROOM_WAIT_S):
                    while self._room() <= 0 and not self._stopping.is_set():
                        await self._news.wait()
        return self._room() > 0 and not self._stopping.is_set()

    async def _handled(self, held: Held) -> None:
        delivery = self._delivery(held)
        held.decoded = True
        await self._handle(delivery)

    def _delivery(self, held: Held) -> Delivery[M]:
        raw, facts = held.raw, held.facts
        message: Any = raw.data if self._kind is bytes else decode(raw.data, self._kind)
        return Delivery(message, raw.subject, self._counted(held), facts.stored_ns, facts.sequence, raw.headers)

    def _counted(self, held: Held) -> int:
        return max(1, held.facts.deliveries - self._excused.get(held.identity, 0))

    # -- settling ---------------------------------------------------------------------------------------------------

    async def _settle(self, held: Held, error: Exception | None) -> None:
        if isinstance(error, Undecodable) and not held.decoded:
            await self._refuse(held, error)
            return
        verdict = settlement(error, self._counted(held), self._max_deliveries, can_move=self._again is not None)
        if error is not None:
            self._log(held, verdict, error)
            ours = error if isinstance(error, JetwakeError) else JetwakeError(f"internal error: {error!r}")
            if isinstance(error, NOT_NOW):
                self._excuse(held)
            if verdict.move and self._again is not None:
                await self._again(self._delivery(held), ours)
            if verdict.tell_client:
                await self._fail(self._delivery(held), ours)
            if verdict.dead_letter:
                await self._settler.bury(held, error)
        await self._answer(held, verdict)

    async def _answer(self, held: Held, verdict: Settlement) -> None:
        if verdict.kind == "nak":
            await self._hand_back(held, verdict.delay_s)
            return
        try:
            await self._settler.confirm(held, ACK if verdict.kind == "ack" else TERM)
        finally:
            self._excused.pop(held.identity, None)
            self._forget(held)

    async def _refuse(self, held: Held, error: Undecodable) -> None:
        """What cannot be decoded: kept for an operator, told to whoever its headers name, and taken off the queue."""
        logger.error("%s: message %d cannot be decoded: %s", self.spec.durable, held.facts.sequence, error)
        await self._settler.bury(held, error)
        await self._settler.tell_undecodable(held, error)
        await self._answer(held, Settlement("term"))

    async def _hand_back(self, held: Held, delay_s: float = 0.0) -> None:
        self._forget(held)
        await self._settler.hand_back(held, delay_s)

    def _forget(self, held: Held) -> None:
        if self._held.pop(held.identity, None) is not None and not held.begun:
            self.unbegun -= 1
        self.room_changed()

    def _excuse(self, held: Held) -> None:
        """This delivery ended in "not now" and does not count. Only here: another worker counts it, which errs to the safe side."""
        if len(self._excused) >= _MAX_EXCUSED:
            self._excused.pop(next(iter(self._excused)))
        self._excused[held.identity] = self._excused.get(held.identity, 0) + 1

    def _log(self, held: Held, verdict: Settlement, error: Exception) -> None:
        usual = isinstance(error, NOT_NOW) or (verdict.kind == "ack" and not verdict.move)
        text = "%s: message %d, delivery %d: %s, because %s"
        facts = (self.spec.durable, held.facts.sequence, held.facts.deliveries, "moved" if verdict.move else verdict.kind, error)
        target = reply_target(held.raw.headers)
        about = {"request_id": target.request_id if target else "", "worker": self._worker}
        logger.log(logging.INFO if usual else logging.WARNING, text, *facts, exc_info=_unexpected(error), extra=about)


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
