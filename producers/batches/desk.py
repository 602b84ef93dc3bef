"""What clients may ask of files and batches, whatever way they come: create, look up, list, cancel, delete.

Raises errors of the one tree; whoever speaks HTTP gives them statuses. An owner sees its own files and batches, and no others.
"""

import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...pipeline.clock import Clock
from ...pipeline.connection import Bus
from ...pipeline.publish import Publisher
from ...schemas.batches import ENDED, BatchRecord
from ...schemas.codec import first_complaint
from ...schemas.errors import InvalidRequest, JetwakeError
from .files import FileStore, StoredFile
from .lines import ENDPOINTS
from .records import BatchStore, new_batch_id
from .settings import BatchSettings

T = TypeVar("T")

_WINDOW = re.compile(r"([1-9]\d{0,4})([smhd])\Z")
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
MAX_WINDOW_S = 30 * 86_400
MIN_LIFE_S, MAX_LIFE_S = 3600, 30 * 86_400


class NotThere(JetwakeError):
    """No file or batch with this id, or it is somebody else's."""

    code = "not_found"


class NotNow(JetwakeError):
    """The batch has ended, or the file is in use."""

    code = "conflict"


class InvalidField(InvalidRequest):
    """`param`: the field that is wrong."""

    def __init__(self, text: str, param: str) -> None:
        super().__init__(text)
        self.param = param


class ExpiresAfter(BaseModel):
    model_config = ConfigDict(extra="forbid")

    anchor: str = Field(pattern="^created_at$")
    seconds: int = Field(ge=MIN_LIFE_S, le=MAX_LIFE_S)


class NewBatch(BaseModel):
    """The body of `POST /v1/batches`."""

    model_config = ConfigDict(extra="forbid")

    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None


@dataclass(frozen=True)
class Page:
    """`has_more`: there are others after these."""

    items: list[dict[str, Any]]
    has_more: bool

    def as_openai(self) -> dict[str, Any]:
        first, last = (self.items[0]["id"], self.items[-1]["id"]) if self.items else (None, None)
        return {"object": "list", "data": self.items, "first_id": first, "last_id": last, "has_more": self.has_more}


class BatchDesk:
    """`model`: whose gateways run what is created here."""

    def __init__(self, bus: Bus, publisher: Publisher, clock: Clock, model: str, settings: BatchSettings) -> None:
        self.settings = settings
        self._files = FileStore(bus, publisher, clock)
        self._batches = BatchStore(bus, publisher)
        self._clock = clock
        self._model = model

    # -- files ----------------------------------------------------------------------------------------------------------

    async def upload(self, owner: str, filename: str, purpose: str, parts: AsyncIterator[bytes], life_s: int | None = None) -> StoredFile:
        if purpose != "batch":
            raise InvalidField(f"the purpose of a file can only be batch here, not {purpose!r}", "purpose")
        if life_s is not None and not MIN_LIFE_S <= life_s <= MAX_LIFE_S:
            raise InvalidField(f"a file can be kept for {MIN_LIFE_S} to {MAX_LIFE_S} seconds, not {life_s}", "expires_after")
        return await self._files.put(filename, "batch", owner, parts, life_s or self.settings.file_life_s)

    async def file(self, owner: str, file_id: str) -> StoredFile:
        found = await self._files.get(file_id, owner)
        if found is None:
            raise NotThere(f"there is no file {file_id}: it was deleted, has expired, or is not yours")
        return found

    def content(self, file: StoredFile) -> AsyncIterator[bytes]:
        return self._files.read(file)

    async def list_files(self, owner: str, purpose: str | None, after: str | None, limit: int, ascending: bool) -> Page:
        files = [file.as_openai() for file in await self._files.newest_first(owner) if purpose in (None, file.purpose)]
        return page_of(list(reversed(files)) if ascending else files, after, limit)

    async def delete_file(self, owner: str, file_id: str) -> None:
        file = await self.file(owner, file_id)
        for record in await self._batches.newest_first(owner):
            if record.input_file_id == file_id and record.status not in ENDED:
                raise NotNow(f"{file_id} is the input of {record.batch_id}, which is {record.status}: cancel that first")
        await self._files.delete(file)

    # -- batches --------------------------------------------------------------------------------------------------------

    async def create(self, owner: str, fields: Any, cache_salt: str = "") -> BatchRecord:
        """`fields`: those of `NewBatch`, as a client gave them."""
        try:
            wanted = NewBatch.model_validate(fields)
        except ValidationError as error:
            where = ".".join(str(part) for part in error.errors(include_url=False, include_input=False)[0]["loc"])
            raise InvalidField(first_complaint(error), where) from error
        if wanted.endpoint not in ENDPOINTS:
            raise InvalidField(f"the endpoint must be one of {', '.join(ENDPOINTS)}, not {wanted.endpoint!r}", "endpoint")
        metadata = wanted.metadata or {}
        if len(metadata) > 16 or any(len(name) > 64 or len(value) > 512 for name, value in metadata.items()):
            raise InvalidField("metadata takes 16 names of up to 64 characters, with values of up to 512", "metadata")
        file = await self._files.get(wanted.input_file_id, owner)
        if file is None or file.purpose != "batch":
            raise InvalidField(f"there is no file {wanted.input_file_id} with purpose batch: upload it to /v1/files first", "input_file_id")
        now_ns = self._clock.now_ns()
        record = BatchRecord(
            batch_id=new_batch_id(),
            owner=owner,
            cache_salt=cache_salt,
            model=self._model,
            endpoint=wanted.endpoint,
            input_file_id=wanted.input_file_id,
            completion_window=wanted.completion_window,
            metadata=metadata,
            output_expires_s=wanted.output_expires_after.seconds if wanted.output_expires_after else 0,
            created_ns=now_ns,
            expires_ns=now_ns + window_s(wanted.completion_window) * 1_000_000_000,
        )
        await self._batches.create(record, self._model)
        return record

    async def batch(self, owner: str, batch_id: str) -> BatchRecord:
        return _own(await self._batches.get(batch_id), owner, batch_id)

    async def list_batches(self, owner: str, after: str | None, limit: int) -> tuple[list[BatchRecord], bool]:
        """The newest first; and whether there are more."""
        records = await self._batches.newest_first(owner)
        kept, has_more = page_after([record.batch_id for record in records], after, limit)
        wanted = set(kept)
        return [record for record in records if record.batch_id in wanted], has_more

    async def cancel(self, owner: str, batch_id: str) -> BatchRecord:
        """Finished lines stay. Raises NotNow when it has ended."""
        _own(await self._batches.get(batch_id), owner, batch_id)
        now_ns = self._clock.now_ns()

        def cancelling(record: BatchRecord) -> BatchRecord:
            if record.status in ("validating", "in_progress"):
                return record.model_copy(update={"status": "cancelling", "cancelling_ns": now_ns})
            return record

        changed = _own(await self._batches.change(batch_id, cancelling), owner, batch_id)
        if changed.status not in ("cancelling", "cancelled"):
            raise NotNow(f"{batch_id} is {changed.status}: only a batch that is not done can be cancelled")
        return changed


def _own(record: BatchRecord | None, owner: str, batch_id: str) -> BatchRecord:
    if record is None or record.owner != owner:
        raise NotThere(f"there is no batch {batch_id}")
    return record


def window_s(text: str) -> int:
    """`24h`, or any other number of seconds, minutes, hours or days up to 30 days. Raises InvalidField."""
    match = _WINDOW.match(text)
    seconds = int(match[1]) * _UNIT_S[match[2]] if match else 0
    if not 0 < seconds <= MAX_WINDOW_S:
        raise InvalidField(f"the completion window is a time like 24h, up to {MAX_WINDOW_S // 86_400}d, not {text!r}", "completion_window")
    return seconds


def page_of(items: list[dict[str, Any]], after: str | None, limit: int) -> Page:
    kept, has_more = page_after([str(item["id"]) for item in items], after, limit)
    wanted = set(kept)
    return Page([item for item in items if item["id"] in wanted], has_more)


def page_after(ids: Sequence[str], after: str | None, limit: int) -> tuple[list[str], bool]:
    """Raises InvalidField when nothing has the id to begin after."""
    start = 0
    if after is not None:
        if after not in ids:
            raise InvalidField(f"there is no {after} to list after", "after")
        start = list(ids).index(after) + 1
    return list(ids[start : start + limit]), len(ids) > start + limit
