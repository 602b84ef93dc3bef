"""vLLM's cache events as block changes under Jetwake's own hashes: the only place where the two namings meet.

Reads the engine's ZeroMQ publisher. vLLM names a block by a hash of its own, which differs between processes; an event tells the
tokens as well, so the chained hash is made from those, and the engine's name is only the key to find parents and removals.
Blocks that depend on more than tokens, adapter and salt (images) are left out: a router that never hears of them expects no hit.
"""

import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import zmq
import zmq.asyncio

from ...schemas.blocks import block_hashes, root_hash
from ...schemas.errors import EngineDead
from ...schemas.tokens import pack_tokens
from ..engine import BlockChange

if TYPE_CHECKING:
    from vllm.distributed.kv_events import BlockRemoved, BlockStored

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Cached:
    """One block content. `copies`: vLLM may hold equal content twice, when two requests computed it at the same time."""

    block_hash: int
    copies: int = 1


class BlockTranslator:
    """Pure: events in, changes out."""

    def __init__(self, model: str, block_size_tokens: int) -> None:
        self._model = model
        self._block_size_tokens = block_size_tokens
        self._cached: dict[int | bytes, _Cached] = {}

    def changes(self, events: Sequence[Any]) -> list[BlockChange]:
        return [change for event in events if (change := self._change(event)) is not None]

    def after_loss(self) -> list[BlockChange]:
        """Events are missing. What was removed meanwhile is not known, so nothing is claimed but what comes from now on."""
        for cached in self._cached.values():
            cached.copies = 0
        return [BlockChange("cleared")]

    def _change(self, event: Any) -> BlockChange | None:
        kind = type(event).__name__
        if kind == "BlockStored":
            return self._stored(event)
        if kind == "BlockRemoved":
            return self._removed(event)
        self._cached.clear()
        return BlockChange("cleared")

    def _stored(self, event: "BlockStored") -> BlockChange | None:
        parent = self._parent(event)
        if parent is None or event.block_size != self._block_size_tokens:
            return None
        hashes = block_hashes(pack_tokens(event.token_ids), event.block_size, parent)
        new: list[int] = []
        for name, block_hash in zip(event.block_hashes, hashes, strict=True):
            cached = self._cached.setdefault(name, _Cached(block_hash, copies=0))
            cached.copies += 1
            if cached.copies == 1:
                new.append(block_hash)
        return BlockChange("stored", new) if new else None

    def _parent(self, event: "BlockStored") -> int | None:
        """The hash before the event's first block; None where it cannot be known."""
        keys = [key for block in event.extra_keys or () for key in block or ()]
        words = [key for key in keys if isinstance(key, str) and key != event.lora_name]
        if any(not isinstance(key, str) for key in keys):
            return None
        if event.parent_block_hash is not None:
            parent = self._cached.get(event.parent_block_hash)
            return parent.block_hash if parent is not None else None
        return root_hash(self._model, event.lora_name or "", words[0] if words else "")

    def _removed(self, event: "BlockRemoved") -> BlockChange | None:
        gone: list[int] = []
        for name in event.block_hashes:
            cached = self._cached.get(name)
            if cached is None:
                continue
            cached.copies -= 1
            if cached.copies <= 0:
                del self._cached[name]
                gone.append(cached.block_hash)
        return BlockChange("removed", gone) if gone else None


class BlockFeed:
    """One reader's end of the engine's publisher. `open` before the engine starts, so that nothing is missed."""

    def __init__(self, endpoint: str, model: str, block_size_tokens: int) -> None:
        self._endpoint = endpoint
        self._translator = BlockTranslator(model, block_size_tokens)
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._next = 0

    def open(self) -> None:
        self._socket = self._context.socket(zmq.SUB)
        self._socket.set_hwm(100_000)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(self._endpoint)

    def close(self) -> None:
        """Safe without `open`, and twice. A reader that still waits is cancelled by its owner."""
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None
        if not self._context.closed:
            self._context.term()
        with suppress(FileNotFoundError):
            os.unlink(self._endpoint.removeprefix("ipc://"))

    async def changes(self) -> list[BlockChange]:
        """Waits for changes; all that have come, in order."""
        changes: list[BlockChange] = []
        while not changes:
            changes += self._read(await self._receive())
        while await self._waiting():
            changes += self._read(await self._receive())
        return changes

    async def _receive(self) -> list[bytes]:
        if self._socket is None:
            raise EngineDead("the engine's cache events are closed")
        return await self._socket.recv_multipart()

    async def _waiting(self) -> bool:
        return self._socket is not None and bool(await self._socket.poll(0))

    def _read(self, frames: list[bytes]) -> list[BlockChange]:
        import msgspec
        from vllm.distributed.kv_events import KVEventBatch

        _, number, payload = frames
        sequence = int.from_bytes(number, "big")
        lost = [] if sequence == self._next else self._translator.after_loss()
        if lost:
            logger.warning("%d batches of cache events are missing", sequence - self._next)
        self._next = sequence + 1
        batch: KVEventBatch = msgspec.msgpack.decode(payload, type=KVEventBatch)
        return lost + self._translator.changes(batch.events)
