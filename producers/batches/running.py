"""Sends the lines of a batch that have no result yet, in an order that suits caches, and records what each got.

Reads and writes through a `LineLog`. Promises: a line is sent as one that nobody sent before only if the log says so; its result is
recorded before anybody counts it; a line that was refused for the moment is sent again, and its result is never that refusal.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from ...schemas.batches import LineResult
from ...schemas.errors import BrokerUnavailable, StreamFull, StreamMissing
from .lines import Line
from .order import send_order
from .window import Window

log = logging.getLogger(__name__)

_AGAIN_S = 1.0
T = TypeVar("T")


@dataclass(frozen=True)
class LineAnswer:
    """`result` None: refused for the moment; `try_again_s` later it may be taken. `sent`: it may have been, all the same."""

    result: LineResult | None = None
    try_again_s: float = 0.0
    sent: bool = True


Ask = Callable[[Line, bool], Awaitable[LineAnswer]]
"""Sends a line and waits for its answer. True: it may have been sent before, and then that request is the one to wait for."""


class LineLog(Protocol):
    """What is known of the lines of one batch."""

    def has_result(self, line: int) -> bool: ...

    def may_be_sent(self, line: int, place: int) -> bool:
        """`place` is the line's in the order of sending."""
        ...

    async def begin(self, line: int, place: int) -> None:
        """To be called before it is sent for the first time: from now on, `may_be_sent`, whoever asks."""
        ...

    async def record(self, result: LineResult) -> LineResult:
        """The line's result from here on: this one, or the one that was there before. Raises BusErrors."""
        ...


async def run_lines(lines: Sequence[Line], line_log: LineLog, ask: Ask, window: Window, on_result: Callable[[LineResult], None]) -> None:
    """Returns when every line has a result. `on_result` hears of each that was not known before."""
    order = await asyncio.to_thread(send_order, [line.trail for line in lines])  # of many lines it takes long
    waiting = [(place, lines[index]) for place, index in enumerate(order) if not line_log.has_result(lines[index].number)]
    async with asyncio.TaskGroup() as tasks:
        for place, line in waiting:
            ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            tasks.create_task(_run_line(line, place, line_log, ask, window, on_result, ready))
            await ready  # so that lines get their places in order


async def _run_line(
    line: Line,
    place: int,
    line_log: LineLog,
    ask: Ask,
    window: Window,
    on_result: Callable[[LineResult], None],
    ready: asyncio.Future[None],
) -> None:
    async with window.place():
        ready.set_result(None)
        may_be_sent = line_log.may_be_sent(line.number, place)
        if not may_be_sent:
            await patiently(lambda: line_log.begin(line.number, place), f"line {line.number} is begun")
        while True:
            answer = await ask(line, may_be_sent)
            if answer.result is not None:
                break
            may_be_sent = answer.sent
            window.refused(answer.try_again_s)
            await asyncio.sleep(answer.try_again_s)
        window.taken()
        result = answer.result  # it is there, and must not be asked for again
        on_result(await patiently(lambda: line_log.record(result), f"line {result.line} of {result.batch_id} is recorded"))


async def patiently(work: Callable[[], Awaitable[T]], doing: str) -> T:
    """Waits for the broker, or for room in it, for as long as that takes."""
    while True:
        try:
            return await work()
        except (BrokerUnavailable, StreamFull, StreamMissing) as error:
            log.warning("%s: not yet: %s", doing, error)
            await asyncio.sleep(_AGAIN_S)
