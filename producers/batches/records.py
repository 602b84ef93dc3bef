"""The batches of this broker: records in the bucket `jw_batches`, jobs on `jw.batches.<model>`, and what a client sees of a record.

Promises: a change is made to the latest state, whoever changed it before; a batch is created by one message, its job, which carries all
that the record needs, so that none is there that nobody runs.
"""

import secrets
from collections.abc import Callable
from typing import Any

from ...pipeline.connection import Bus
from ...pipeline.key_value import Bucket, Entry
from ...pipeline.publish import Publisher
from ...schemas import subjects
from ...schemas.batches import BatchJob, BatchRecord
from ...schemas.codec import decode, encode
from ...schemas.errors import BrokerUnavailable, SequenceConflict, Undecodable
from ...schemas.streams import BATCHES_BUCKET

KEEP_S = 32 * 86_400
"""How long after its last change a batch can be looked up."""
_TRIES = 50


class BatchStore:
    def __init__(self, bus: Bus, publisher: Publisher) -> None:
        self._bucket = Bucket(bus, publisher, BATCHES_BUCKET)
        self._publisher = publisher

    async def create(self, record: BatchRecord, lane: str) -> None:
        """`lane`: the model whose gateways run it. When this returns, it will be run, and can be looked up."""
        job = BatchJob(record=record)
        await self._publisher.store(subjects.batches(lane), job, message_id=subjects.message_id(record.batch_id, "job", 1))
        await self.ensure(record)

    async def ensure(self, record: BatchRecord) -> BatchRecord:
        """The record as it is now; made when it is not there."""
        try:
            await self._bucket.create(record.batch_id, encode(record), KEEP_S)
        except SequenceConflict:
            return await self.get(record.batch_id) or record
        return record

    async def get(self, batch_id: str) -> BatchRecord | None:
        entry = await self._entry(batch_id)
        return None if entry is None else decode(entry.value, BatchRecord)

    async def change(self, batch_id: str, change: Callable[[BatchRecord], BatchRecord]) -> BatchRecord | None:
        """`change` may be called several times, each with a later state; what it gives is stored. None: there is no such batch."""
        for _ in range(_TRIES):
            entry = await self._entry(batch_id)
            if entry is None:
                return None
            record = decode(entry.value, BatchRecord)
            changed = change(record)
            if changed == record:
                return record
            try:
                await self._bucket.update(entry, encode(changed), KEEP_S)
            except SequenceConflict:
                continue
            return changed
        raise BrokerUnavailable(f"the record of {batch_id} changes faster than it can be written")

    async def newest_first(self, owner: str) -> list[BatchRecord]:
        found: list[BatchRecord] = []
        async for entry in self._bucket.entries():
            try:
                record = decode(entry.value, BatchRecord)
            except Undecodable:
                continue  # of a later version, perhaps
            if record.owner == owner:
                found.append(record)
        return sorted(found, key=lambda record: (record.created_ns, record.batch_id), reverse=True)

    async def _entry(self, batch_id: str) -> Entry | None:
        return await self._bucket.get(batch_id)


def new_batch_id() -> str:
    return f"batch_{secrets.token_hex(16)}"


def as_openai(record: BatchRecord) -> dict[str, Any]:
    """The `Batch` object of OpenAI's API."""
    errors = None
    if record.errors:
        listed = [error.model_dump(include={"code", "line", "message", "param"}) for error in record.errors]
        errors = {"object": "list", "data": listed}
    times = ("in_progress", "expires", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    usage = {
        "input_tokens": record.prompt_tokens,
        "input_tokens_details": {"cached_tokens": record.cached_tokens},
        "output_tokens": record.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": record.prompt_tokens + record.output_tokens,
    }
    return {
        "id": record.batch_id,
        "object": "batch",
        "endpoint": record.endpoint,
        "model": record.model or None,
        "errors": errors,
        "input_file_id": record.input_file_id,
        "completion_window": record.completion_window,
        "status": record.status,
        "output_file_id": record.output_file_id or None,
        "error_file_id": record.error_file_id or None,
        "created_at": _seconds(record.created_ns),
        **{f"{name}_at": _seconds(getattr(record, f"{name}_ns")) for name in times},
        "request_counts": {"total": record.total_lines, "completed": record.completed_lines, "failed": record.failed_lines},
        "metadata": record.metadata or None,
        "usage": usage,
    }


def _seconds(time_ns: int) -> int | None:
    return time_ns // 1_000_000_000 if time_ns else None
