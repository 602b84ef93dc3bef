"""An object store on JetStream, in the form that every NATS client reads: chunks on one subject, a description on another.

Reads and writes `$O.<store>.*` by raw requests. Promises: an object is there for everybody when `put` returns, and before that for
nobody; memory holds a few chunks at a time, whatever the size; what was read is compared with the digest of what was written; an
object with a life (`ttl_s`) is taken away by the broker itself, and what an upload that was cut off left behind, too.
"""

import asyncio
import base64
import hashlib
import json
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from ..schemas.errors import BusRejected, JetwakeError
from ..schemas.streams import ObjectsSpec
from .connection import Bus, RawMessage
from .jetstream import ROLLUP_HEADER, SEQUENCE_HEADER, chunk_subject, meta_subject, newest_message, objects_stream, stored_page
from .publish import Publisher
from .topology import purge

CHUNK_BYTES = 256 << 10
_CHUNKS_AT_ONCE = 16
_CHUNK_EXTRA_TTL_S = 3600
"""Chunks are stored before their description and must outlive it."""
_PAGE = 256
_LATE_TRIES, _LATE_PAUSE_S = 20, 0.1
"""In a cluster any replica gives the chunks, and one of them may be behind."""
_DIGEST = "SHA-256="


@dataclass(frozen=True)
class StoredObject:
    """`metadata` is the writer's own. `upload` names the chunks; `first_sequence` is where they begin."""

    name: str
    size_bytes: int
    upload: str
    digest: str
    chunks: int
    first_sequence: int = 1
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])


class ObjectStore:
    def __init__(self, bus: Bus, publisher: Publisher, spec: ObjectsSpec) -> None:
        self._bus = bus
        self._publisher = publisher
        self._name = spec.name
        self._stream = objects_stream(spec.name)

    async def put(self, name: str, parts: AsyncIterator[bytes], metadata: Mapping[str, str], ttl_s: int | None = None) -> StoredObject:
        """Stores what `parts` gives, in place of what has this name. What it raises, and BusErrors (StreamFull: no room), leave nothing behind."""
        before, upload = await self.get(name), secrets.token_hex(11)
        try:
            stored = await self._put_chunks(name, upload, parts, metadata, ttl_s)
            await self._publisher.store_bytes(
                self._meta_subject(name),
                _describe(self._name, stored),
                message_id=f"{upload}:meta",
                headers={ROLLUP_HEADER: "sub"},
                ttl_s=ttl_s,
            )
        except BaseException:
            with suppress(JetwakeError):  # the first error is the one to tell
                await purge(self._bus, self._stream, chunk_subject(self._name, upload))
            raise
        if before is not None:
            await purge(self._bus, self._stream, chunk_subject(self._name, before.upload))
        return stored

    async def get(self, name: str) -> StoredObject | None:
        message = await newest_message(self._bus, self._stream, self._meta_subject(name))
        return None if message is None else _described(message)

    async def all(self) -> AsyncGenerator[StoredObject]:
        """The one that was stored first, first."""
        first_sequence = 1
        while True:
            page = await stored_page(self._bus, self._stream, meta_subject(self._name, ">"), first_sequence, _PAGE)
            for message in page:
                described = _described(message)
                if described is not None:
                    yield described
            if len(page) < _PAGE:
                return
            first_sequence = int(page[-1].headers[SEQUENCE_HEADER]) + 1

    async def read(self, stored: StoredObject) -> AsyncGenerator[bytes]:
        """Its bytes, in parts. Raises BusRejected when they are not those that were stored, after the last part."""
        digest, chunks, late = hashlib.sha256(), 0, 0
        first_sequence, subject = stored.first_sequence, chunk_subject(self._name, stored.upload)
        while chunks < stored.chunks:
            page = await stored_page(self._bus, self._stream, subject, first_sequence, min(_CHUNKS_AT_ONCE, stored.chunks - chunks))
            if not page:
                late += 1
                if late > _LATE_TRIES:
                    break
                await asyncio.sleep(_LATE_PAUSE_S)
                continue
            for message in page:
                digest.update(message.data)
                yield message.data
            chunks += len(page)
            first_sequence = int(page[-1].headers[SEQUENCE_HEADER]) + 1
        if _digest_text(digest.digest()) != stored.digest:
            raise BusRejected(f"{stored.name}: {chunks} of {stored.chunks} chunks are there, or they are not those that were stored")

    async def delete(self, name: str) -> bool:
        """False when it was not there."""
        stored = await self.get(name)
        if stored is None:
            return False
        await purge(self._bus, self._stream, self._meta_subject(name))
        await purge(self._bus, self._stream, chunk_subject(self._name, stored.upload))
        return True

    async def _put_chunks(
        self, name: str, upload: str, parts: AsyncIterator[bytes], metadata: Mapping[str, str], ttl_s: int | None
    ) -> StoredObject:
        """One after the other: a chunk whose answer is lost is sent again before the next, so that they stay in order."""
        subject, digest = chunk_subject(self._name, upload), hashlib.sha256()
        size = chunks = first_sequence = 0
        chunk_ttl_s = None if ttl_s is None else ttl_s + _CHUNK_EXTRA_TTL_S
        async for chunk in in_chunks(parts, min(CHUNK_BYTES, self._bus.max_payload_bytes // 2)):
            stored = await self._publisher.store_bytes(subject, chunk, message_id=f"{upload}:{chunks}", ttl_s=chunk_ttl_s)
            first_sequence = first_sequence or stored.sequence
            digest.update(chunk)
            size += len(chunk)
            chunks += 1
        return StoredObject(name, size, upload, _digest_text(digest.digest()), chunks, max(1, first_sequence), dict(metadata))

    def _meta_subject(self, name: str) -> str:
        return meta_subject(self._name, base64.urlsafe_b64encode(name.encode()).decode())


async def in_chunks(parts: AsyncIterator[bytes], size_bytes: int) -> AsyncGenerator[bytes]:
    """The same bytes in parts of this size, the last one smaller."""
    waiting = bytearray()
    async for part in parts:
        waiting += part
        while len(waiting) >= size_bytes:
            yield bytes(waiting[:size_bytes])
            del waiting[:size_bytes]
    if waiting:
        yield bytes(waiting)


def _digest_text(digest: bytes) -> str:
    return _DIGEST + base64.urlsafe_b64encode(digest).decode()


def _describe(store: str, stored: StoredObject) -> bytes:
    fields: dict[str, Any] = {
        "name": stored.name,
        "bucket": store,
        "nuid": stored.upload,
        "size": stored.size_bytes,
        "mtime": datetime.now(UTC).isoformat(),
        "chunks": stored.chunks,
        "digest": stored.digest,
        "metadata": {**stored.metadata, "jw_first_sequence": str(stored.first_sequence)},
    }
    return json.dumps(fields).encode()


def _described(message: RawMessage) -> StoredObject | None:
    """None: it was deleted, or is nothing that we could have written."""
    try:
        fields: dict[str, Any] = json.loads(message.data)
        metadata: dict[str, str] = dict(fields.get("metadata") or {})
        first_sequence = int(metadata.pop("jw_first_sequence", "1"))
        if fields.get("deleted"):
            return None
        return StoredObject(
            str(fields["name"]),
            int(fields["size"]),
            str(fields["nuid"]),
            str(fields["digest"]),
            int(fields["chunks"]),
            first_sequence,
            metadata,
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
