"""Runs batches: takes their jobs, checks the input, sends the lines, writes the files. One gateway at a time runs a batch.

Reads the jobs of one model on `jw.batches.<model>`: whoever holds the message runs the batch, and when it dies another one gets it
within seconds. Promises: every batch ends; one that changes hands goes on where it was; a gateway that is told to stop leaves the
lines that run to whoever comes next.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

from ...pipeline.clock import ServerClock
from ...pipeline.connection import Bus
from ...pipeline.consume import Consumer, Delivery
from ...pipeline.publish import Publisher
from ...pipeline.topology_keeper import declaring
from ...schemas.batches import ENDED, BatchJob, BatchRecord
from ...schemas.errors import JetwakeError
from ...schemas.streams import batch_consumer
from ...schemas.subjects import model_token
from .crowding import make_way
from .files import FileStore
from .lines import BodyCheck, Line, LineFile
from .one_batch import OneBatch
from .records import BatchStore
from .running import LineAnswer
from .settings import BatchSettings
from .window import Window

logger = logging.getLogger(__name__)

MAX_DELIVERIES = 100
"""A batch may see many gateways come and go in a day; one that ended so many of them is given up."""


class Asking(Protocol):
    """Sends lines to the OpenAI layer. `cancelling`: a line that is left is to end; else it runs on, for whoever asks again."""

    cancelling: bool

    async def __call__(self, line: Line, may_be_sent: bool) -> LineAnswer: ...


AskFor = Callable[[BatchRecord, LineFile], AbstractAsyncContextManager[Asking]]


class BatchRunner:
    """`model`: whose batches are run; `knows`: whether it, or another of its names, is meant. `scratch` makes a folder for one input file.

    `others`: open requests of this process that are not of batches, which these make way for.
    """

    def __init__(
        self,
        bus: Bus,
        publisher: Publisher,
        clock: ServerClock,
        *,
        name: str,
        model: str,
        knows: Callable[[str], bool],
        check_body: BodyCheck,
        ask_for: AskFor,
        scratch: Callable[[], AbstractAsyncContextManager[Path]],
        settings: BatchSettings,
        others: Callable[[], int] = lambda: 0,
    ) -> None:
        self._bus = bus
        self._publisher = publisher
        self._clock = clock
        self._store = BatchStore(bus, publisher)
        self._files = FileStore(bus, publisher, clock)
        self._knows = knows
        self._check_body = check_body
        self._ask_for = ask_for
        self._scratch = scratch
        self._settings = settings
        self._window = Window(settings.lines_at_once)
        self._others = others
        self._running = 0
        spec = batch_consumer(model_token(model))
        self._consumer: Consumer[BatchJob] = Consumer(
            bus,
            publisher,
            spec,
            BatchJob,
            self._handle,
            lambda: settings.batches_at_once - self._running,
            self._fail,
            stage="batches",
            worker=name,
            max_deliveries=MAX_DELIVERIES,
            clock=clock,
            declare=declaring(bus, spec),
        )

    async def run(self) -> None:
        """Until `stop`."""
        making_way = asyncio.create_task(make_way(self._window, self._others))
        try:
            await self._consumer.run()
        finally:
            making_way.cancel()

    async def stop(self) -> None:
        """Batches in hand go back, at once; their lines run on."""
        await self._consumer.stop(0.0)

    async def _handle(self, delivery: Delivery[BatchJob]) -> None:
        self._running += 1
        try:
            record = await self._store.ensure(delivery.message.record)
            async with self._scratch() as folder:
                batch = OneBatch(
                    record.batch_id,
                    folder / "input.jsonl",
                    bus=self._bus,
                    publisher=self._publisher,
                    clock=self._clock,
                    store=self._store,
                    files=self._files,
                    window=self._window,
                    settings=self._settings,
                )
                if record.status in ENDED:  # its gateway died after the last step but one
                    await batch.forget_lines()
                    return
                logger.info("batch %s: %s", record.batch_id, record.status if delivery.deliveries == 1 else "taken up again")
                await batch.run(self._knows, self._check_body, self._ask_for)
        finally:
            self._running -= 1

    async def _fail(self, delivery: Delivery[BatchJob], error: JetwakeError) -> None:
        """Nothing more can be done for it: what it has is not lost, but it must not stay open for ever."""
        from .one_batch import failed_for

        await self._store.change(delivery.message.record.batch_id, lambda record: failed_for(record, error, self._clock.now_ns()))
