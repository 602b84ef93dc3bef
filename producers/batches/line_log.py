"""What the lines of one batch got, in the broker: whoever runs the batch next goes on from here.

Writes and reads `jw.batchlines.<batch>.<line>`. Promises: each line's first result is the one that stays; memory holds one number for
each line and no results.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable

from ...pipeline.connection import Bus
from ...pipeline.jetstream import SEQUENCE_HEADER, message_at, newest_message, stored_page
from ...pipeline.publish import Publisher
from ...pipeline.topology import purge
from ...schemas import subjects
from ...schemas.batches import LineResult
from ...schemas.codec import decode
from ...schemas.errors import BusRejected, PayloadTooLarge, SequenceConflict
from ...schemas.streams import BATCH_LINES

_PAGE = 64
_READ_AHEAD = 32
BEGIN_AHEAD = 64
"""Lines are marked as begun so many at once: a batch that changes hands is careful with no more than these and those on the way."""


class BusLineLog:
    """`begun`: places in the order of sending below which lines may have been sent; None: any of them. `note_begun` stores a new mark."""

    def __init__(
        self, bus: Bus, publisher: Publisher, batch_id: str, begun: int | None, note_begun: Callable[[int], Awaitable[None]]
    ) -> None:
        self._bus = bus
        self._publisher = publisher
        self._batch_id = batch_id
        self._begun_before = begun
        self._begun = begun or 0
        self._note_begun = note_begun
        self._noting = asyncio.Lock()
        self._writer = secrets.token_hex(6)
        self._sequences: dict[int, int] = {}

    async def load(self) -> AsyncGenerator[LineResult]:
        """All that is recorded, to be counted. Other methods are for after it."""
        first_sequence = 1
        while True:
            page = await stored_page(self._bus, BATCH_LINES.name, subjects.batch_lines(self._batch_id), first_sequence, _PAGE)
            for message in page:
                result = decode(message.data, LineResult)
                self._sequences[result.line] = int(message.headers[SEQUENCE_HEADER])
                yield result
            if len(page) < _PAGE:
                return
            first_sequence = int(page[-1].headers[SEQUENCE_HEADER]) + 1

    def has_result(self, line: int) -> bool:
        return line in self._sequences

    def may_be_sent(self, line: int, place: int) -> bool:
        return self._begun_before is None or place < self._begun_before

    async def begin(self, line: int, place: int) -> None:
        async with self._noting:
            if place >= self._begun:
                self._begun = place + BEGIN_AHEAD
                await self._note_begun(self._begun)

    async def record(self, result: LineResult) -> LineResult:
        subject = subjects.batch_line(self._batch_id, result.line)
        # An id of this very store: another runner's result must meet the compare-and-set, not be taken for ours.
        message_id = f"{subject}:{self._writer}"
        try:
            stored = await self._publisher.store(subject, result, message_id=message_id, first_only=True)
        except PayloadTooLarge as error:
            return await self.record(too_large(result, str(error)))
        except SequenceConflict:
            message = await newest_message(self._bus, BATCH_LINES.name, subject)
            if message is None:
                raise
            self._sequences[result.line] = int(message.headers[SEQUENCE_HEADER])
            return decode(message.data, LineResult)
        self._sequences[result.line] = stored.sequence
        return result

    async def results(self, lines: Iterable[int]) -> AsyncGenerator[LineResult]:
        """Of these lines, in this order; some are read ahead."""
        reading: list[asyncio.Task[LineResult]] = []
        try:
            for line in lines:
                reading.append(asyncio.create_task(self._read(line)))
                if len(reading) >= _READ_AHEAD:
                    yield await reading.pop(0)
            while reading:
                yield await reading.pop(0)
        finally:
            for task in reading:
                task.cancel()

    async def forget(self) -> None:
        """When the files are written."""
        await purge(self._bus, BATCH_LINES.name, subjects.batch_lines(self._batch_id))

    async def _read(self, line: int) -> LineResult:
        message = await message_at(self._bus, BATCH_LINES.name, self._sequences[line])
        if message is None:
            raise BusRejected(f"the result of line {line} of {self._batch_id} was stored and is gone")
        return decode(message.data, LineResult)


def too_large(result: LineResult, text: str) -> LineResult:
    """In place of one that the broker does not carry."""
    body = f'{{"error": {{"message": "the answer of {len(result.body)} bytes cannot be kept ({text}): ask for less, or no logprobs", '
    body += '"type": "request_too_large", "param": null, "code": "payload_too_large"}}'
    return result.model_copy(update={"status": 413, "body": body.encode()})
