"""Keeps the prefix index true: follows workers' KV events, notices gaps, and asks for a snapshot where it cannot be sure.

Reads `jw.kv.<worker>` and worker cards; asks on `jw.snapshot.<lane>`. Promises: at most one question a lane at a time; events that
come while a snapshot is on its way are kept and applied after it; a dead incarnation is forgotten at once.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from ..pipeline.connection import Bus, RawMessage
from ..pipeline.registry import Registry
from ..schemas import subjects
from ..schemas.blocks import unpack_hashes
from ..schemas.codec import decode, encode
from ..schemas.errors import BusError, Undecodable
from ..schemas.kv_events import KvEvents, KvSnapshotChunk, KvSnapshotWanted
from ..schemas.workers import WorkerCard
from .prefix_index import PrefixIndex

log = logging.getLogger(__name__)

ASK_AGAIN_S = 1.0
SYNC_POLL_S = 0.01
MAX_WAITING_BATCHES = 10_000


class LaneFollower:
    """One incarnation's events, applied to the index in order and without gaps. Pure: `wants_snapshot` says when to ask."""

    def __init__(self, lane: str, index: PrefixIndex) -> None:
        self._lane = lane
        self._index = index
        self._number: int | None = None
        self._waiting: dict[int, KvEvents] = {}
        self._chunks: dict[int, KvSnapshotChunk] = {}
        self.gaps = 0

    @property
    def wants_snapshot(self) -> bool:
        return self._number is None

    def on_events(self, events: KvEvents) -> None:
        if self._number is None:
            self._keep(events)
        elif events.number == self._number + 1:
            self._apply(events)
        elif events.number > self._number:
            self.gaps += 1
            self._number = None
            self._keep(events)

    def doubt(self) -> None:
        """Events may have gone missing unnoticed: only a snapshot is the truth now."""
        self._number = None

    def on_chunk(self, chunk: KvSnapshotChunk) -> None:
        """Parts of one snapshot may come in any order; a part of another one begins anew."""
        if self._number is not None:
            return
        if any(other.number != chunk.number or other.chunks != chunk.chunks for other in self._chunks.values()):
            self._chunks.clear()
        self._chunks[chunk.index] = chunk
        if len(self._chunks) == chunk.chunks:
            self._start_from([self._chunks[index] for index in sorted(self._chunks)])

    def _start_from(self, chunks: Sequence[KvSnapshotChunk]) -> None:
        first, *others = chunks
        self._index.replace(self._lane, unpack_hashes(first.hashes))
        for chunk in others:
            self._index.stored(self._lane, unpack_hashes(chunk.hashes))
        self._chunks.clear()
        self._number = first.number
        waiting, self._waiting = self._waiting, {}
        for number in sorted(waiting):
            self.on_events(waiting[number])

    def _keep(self, events: KvEvents) -> None:
        """For after the snapshot. Believed for now as well: mostly right is better than old, and the snapshot replaces all."""
        self._change_index(events)
        if len(self._waiting) >= MAX_WAITING_BATCHES:
            self._waiting.pop(min(self._waiting))  # a gap then, and the next snapshot closes it
        self._waiting[events.number] = events

    def _apply(self, events: KvEvents) -> None:
        self._change_index(events)
        self._number = events.number

    def _change_index(self, events: KvEvents) -> None:
        for change in events.changes:
            if change.kind == "stored":
                self._index.stored(self._lane, unpack_hashes(change.hashes))
            elif change.kind == "removed":
                self._index.removed(self._lane, unpack_hashes(change.hashes))
            else:
                self._index.cleared(self._lane)


@dataclass
class _Followed:
    follower: LaneFollower
    asked_s: float = field(default=float("-inf"))


class IndexFeed:
    """`follows`: the workers whose caches matter. `hears_events` False (engines that tell none): the index lives by the router's own
    decisions; only the dead are forgotten.
    """

    def __init__(
        self,
        bus: Bus,
        registry: Registry,
        index: PrefixIndex,
        router: str,
        *,
        follows: Callable[[WorkerCard], bool] = lambda _: True,
        hears_events: bool = True,
    ) -> None:
        self._bus = bus
        self._registry = registry
        self._index = index
        self._router = router
        self._follows = follows
        self._hears_events = hears_events
        self._followed: dict[str, _Followed] = {}
        self._inbox = bus.new_inbox()
        self._changed = asyncio.Event()
        registry.on_change(self._on_workers)

    async def listen(self) -> None:
        if self._hears_events:
            await self._bus.subscribe(subjects.KV_EVENTS, self._on_events)
            await self._bus.subscribe(self._inbox, self._on_chunk)
        self._on_workers()

    async def wait_until_synced(self, timeout_s: float) -> None:
        """Until every lane known now was heard, or long enough: a router that knows nothing routes by load."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.unsynced:
                    await asyncio.sleep(SYNC_POLL_S)

    @property
    def unsynced(self) -> set[str]:
        if not self._hears_events:
            return set()
        return {lane for lane, followed in self._followed.items() if followed.follower.wants_snapshot}

    async def run(self) -> None:
        """Asks for the snapshots that are wanted, until cancelled."""
        self._bus.on_reconnect(self._doubt_all)
        while True:
            self._changed.clear()
            try:
                await self._ask()
            except BusError as error:
                log.warning("cannot ask for snapshots now: %s", error)
            try:
                async with asyncio.timeout(ASK_AGAIN_S if self.unsynced else None):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _doubt_all(self) -> None:
        for followed in self._followed.values():
            followed.follower.doubt()
        self._changed.set()

    async def _ask(self) -> None:
        now_s = asyncio.get_running_loop().time()
        for lane in self.unsynced:
            followed = self._followed[lane]
            if now_s - followed.asked_s >= ASK_AGAIN_S:
                followed.asked_s = now_s
                wanted = encode(KvSnapshotWanted(router=self._router))
                await self._bus.publish_with_reply(subjects.snapshot(lane), wanted, self._inbox)

    def _on_workers(self) -> None:
        cards = self._registry.workers.values()
        for gone in {*self._followed, *self._index.lanes} - {card.lane for card in cards}:
            self._followed.pop(gone, None)
            self._index.forget(gone)
        for new in {card.lane for card in cards if self._follows(card)} - self._followed.keys():
            self._followed[new] = _Followed(LaneFollower(new, self._index))
        self._changed.set()

    def _on_events(self, message: RawMessage) -> None:
        try:
            events = decode(message.data, KvEvents)
            followed = self._followed.get(f"{events.worker}-{events.incarnation}")
            if followed is not None:
                followed.follower.on_events(events)
                if followed.follower.wants_snapshot:
                    self._changed.set()
        except Undecodable as error:
            log.warning("KV events that cannot be read: %s", error)

    def _on_chunk(self, message: RawMessage) -> None:
        if not message.data:
            return  # the broker says that nobody has that lane now
        try:
            chunk = decode(message.data, KvSnapshotChunk)
            followed = self._followed.get(f"{chunk.worker}-{chunk.incarnation}")
            if followed is not None:
                followed.follower.on_chunk(chunk)
        except Undecodable as error:
            log.warning("a snapshot that cannot be read: %s", error)
