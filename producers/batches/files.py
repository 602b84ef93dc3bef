"""The files of OpenAI's files API, in the broker's object store. Each has a life; the broker takes away what is over.

Reads and writes the object store `jw_files`. Promises: a file belongs to one owner, and for everybody else it is not there.
"""

import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ...pipeline.clock import Clock
from ...pipeline.connection import Bus
from ...pipeline.objects import ObjectStore, StoredObject
from ...pipeline.publish import Publisher
from ...schemas.streams import FILES

Purpose = Literal["batch", "batch_output"]


@dataclass(frozen=True)
class StoredFile:
    """`created_s` and `expires_s` are seconds since the epoch."""

    file_id: str
    filename: str
    purpose: str
    owner: str
    size_bytes: int
    created_s: int
    expires_s: int
    stored: StoredObject

    def as_openai(self) -> dict[str, Any]:
        """The `FileObject` of OpenAI's API."""
        return {
            "id": self.file_id,
            "object": "file",
            "bytes": self.size_bytes,
            "created_at": self.created_s,
            "expires_at": self.expires_s,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class FileStore:
    def __init__(self, bus: Bus, publisher: Publisher, clock: Clock) -> None:
        self._objects = ObjectStore(bus, publisher, FILES)
        self._clock = clock

    async def put(
        self, filename: str, purpose: Purpose, owner: str, parts: AsyncIterator[bytes], life_s: int, file_id: str = ""
    ) -> StoredFile:
        """`file_id` given: one that is there is replaced. Raises what `parts` raises, and BusErrors."""
        created_s = self._clock.now_ns() // 1_000_000_000
        facts = {
            "filename": filename,
            "purpose": purpose,
            "owner": owner,
            "created_s": str(created_s),
            "expires_s": str(created_s + life_s),
        }
        stored = await self._objects.put(file_id or new_file_id(), parts, facts, ttl_s=life_s)
        return _file_of(stored)

    async def get(self, file_id: str, owner: str) -> StoredFile | None:
        stored = await self._objects.get(file_id)
        if stored is None or stored.metadata.get("owner", "") != owner:
            return None
        return _file_of(stored)

    async def newest_first(self, owner: str) -> list[StoredFile]:
        found = [_file_of(stored) async for stored in self._objects.all() if stored.metadata.get("owner", "") == owner]
        return sorted(found, key=lambda file: (file.created_s, file.file_id), reverse=True)

    def read(self, file: StoredFile) -> AsyncGenerator[bytes]:
        return self._objects.read(file.stored)

    async def fetch(self, file: StoredFile, path: Path) -> None:
        """Writes its content there."""
        with path.open("wb") as target:
            async for part in self.read(file):
                target.write(part)

    async def delete(self, file: StoredFile) -> bool:
        return await self._objects.delete(file.file_id)


def new_file_id() -> str:
    return f"file-{secrets.token_hex(16)}"


def _file_of(stored: StoredObject) -> StoredFile:
    facts = stored.metadata
    return StoredFile(
        file_id=stored.name,
        filename=facts.get("filename", stored.name),
        purpose=facts.get("purpose", "batch"),
        owner=facts.get("owner", ""),
        size_bytes=stored.size_bytes,
        created_s=int(facts.get("created_s", "0")),
        expires_s=int(facts.get("expires_s", "0")),
        stored=stored,
    )
