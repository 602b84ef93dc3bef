"""Read by routers: what a worker's KV cache gained and lost, from `jw.kv.<worker>`, and all it holds, from `jw.snapshot.<lane>`.

Blocks are named by Jetwake's chained hash (`schemas.blocks`), whatever the engine calls them. Batches are numbered without gaps
within an incarnation; a reader that finds a gap asks for a snapshot, which says up to which number it is true.
"""

from typing import Annotated, Literal

from pydantic import Field

from .codec import Message
from .requests import SafeToken

HashBytes = Annotated[
    bytes, Field(description="block hashes, little-endian unsigned 64-bit, in prompt order where they were stored together")
]


class KvChange(Message):
    """Blocks that came or went together; `cleared` means all of this worker's, and has no hashes."""

    kind: Literal["stored", "removed", "cleared"]
    hashes: HashBytes = b""


class KvEvents(Message):
    """Changes in the order in which they happened. `number` counts batches from 1 within the incarnation."""

    type: Literal["kv_events"] = "kv_events"
    worker: SafeToken
    incarnation: SafeToken
    number: int = Field(ge=1)
    changes: list[KvChange]


class KvSnapshotWanted(Message):
    """Asked on `jw.snapshot.<worker>-<incarnation>`; the chunks come to the reply subject."""

    type: Literal["kv_snapshot_wanted"] = "kv_snapshot_wanted"
    router: SafeToken


class KvSnapshotChunk(Message):
    """Part `index` of `chunks` of everything the worker holds after batch `number` (0: before the first)."""

    type: Literal["kv_snapshot"] = "kv_snapshot"
    worker: SafeToken
    incarnation: SafeToken
    number: int = Field(ge=0)
    index: int = Field(ge=0)
    chunks: int = Field(ge=1)
    hashes: HashBytes = b""
