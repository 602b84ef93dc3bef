"""Tells routers what this worker's KV cache holds: changes as they happen, in numbered batches, and everything on request.

Reads the engine's block changes (already in Jetwake's hashes); answers `jw.snapshot.<lane>`; writes `jw.kv.<worker>` once somebody has
asked for a snapshot, which all who follow it do first: of a decode worker most routers want to know nothing. Promises: numbers have no
gaps within an incarnation, a snapshot is exactly the state after the batch it names, and what comes after that batch is told.
"""

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence

from ..pipeline.connection import Bus, RawMessage
from ..pipeline.publish import Publisher
from ..schemas import subjects
from ..schemas.blocks import pack_hashes
from ..schemas.codec import encode
from ..schemas.errors import BusError
from ..schemas.kv_events import KvChange, KvEvents, KvSnapshotChunk
from ..schemas.workers import WorkerCard
from .engine import BlockChange, Engine
from .untold_blocks import UntoldBlocks

log = logging.getLogger(__name__)

BATCH_EVERY_S = 0.02
"""Routers expect what they sent to be cached meanwhile (`PrefixIndex.predict`), so this costs them nothing."""
HASHES_PER_MESSAGE = 32_768


class KvEventPublisher:
    """`held`: what the cache is known to hold, by hash: changed as the engine tells, and handed on to the next incarnation."""

    def __init__(self, engine: Engine, card: WorkerCard, bus: Bus, publisher: Publisher, held: dict[int, None]) -> None:
        self._engine = engine
        self._card = card
        self._bus = bus
        self._publisher = publisher
        self._held = held
        self._number = 0
        self.untold = UntoldBlocks(card.compatibility.block_size_tokens)
        self._is_followed = False
        self._asked: asyncio.Queue[str] = asyncio.Queue()

    async def listen(self) -> None:
        await self._bus.subscribe(subjects.snapshot(self._card.lane), self._on_asked)

    async def run(self) -> None:
        """Until cancelled. Raises EngineDead."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._tell_changes())
            tasks.create_task(self._answer())

    async def _tell_changes(self) -> None:
        while True:
            for batch in batches(await self._engine.block_changes()):
                self._remember(batch)
                self._number += 1
                if not self._is_followed:
                    self.untold.told(time.monotonic())  # to all that want to know
                    continue
                events = KvEvents(
                    worker=self._card.worker,
                    incarnation=self._card.incarnation,
                    number=self._number,
                    changes=[KvChange(kind=change.kind, hashes=pack_hashes(change.hashes)) for change in batch],
                )
                try:
                    await self._publisher.send(subjects.kv(self._card.worker), events)
                    self.untold.told(time.monotonic())
                except BusError as error:  # readers see the gap in the numbers and ask for a snapshot
                    log.warning("KV events %d not told: %s", self._number, error)
            await asyncio.sleep(BATCH_EVERY_S)  # what happens meanwhile goes out together

    async def _answer(self) -> None:
        while True:
            reply = await self._asked.get()
            try:
                for chunk in self._snapshot():
                    await self._bus.publish(reply, encode(chunk))
            except BusError as error:  # the router asks again
                log.warning("a snapshot was not told: %s", error)

    def _snapshot(self) -> list[KvSnapshotChunk]:
        hashes, number = list(self._held), self._number
        parts = [hashes[start : start + HASHES_PER_MESSAGE] for start in range(0, len(hashes), HASHES_PER_MESSAGE)] or [[]]
        return [
            KvSnapshotChunk(
                worker=self._card.worker,
                incarnation=self._card.incarnation,
                number=number,
                index=index,
                chunks=len(parts),
                hashes=pack_hashes(part),
            )
            for index, part in enumerate(parts)
        ]

    def _remember(self, changes: Sequence[BlockChange]) -> None:
        for change in changes:
            if change.kind == "stored":
                self._held.update(dict.fromkeys(change.hashes))
            elif change.kind == "removed":
                for block in change.hashes:
                    self._held.pop(block, None)
            else:
                self._held.clear()

    def _on_asked(self, message: RawMessage) -> None:
        if message.reply:
            self._is_followed = True
            self._asked.put_nowait(message.reply)


def batches(changes: Sequence[BlockChange]) -> Iterator[list[BlockChange]]:
    """Changes in order, in groups that fit into one message each. Pure."""
    batch: list[BlockChange] = []
    size = 0
    for change in changes:
        for start in range(0, max(1, len(change.hashes)), HASHES_PER_MESSAGE):
            part = BlockChange(change.kind, change.hashes[start : start + HASHES_PER_MESSAGE])
            if batch and size + len(part.hashes) > HASHES_PER_MESSAGE:
                yield batch
                batch, size = [], 0
            batch.append(part)
            size += len(part.hashes)
    if batch:
        yield batch
