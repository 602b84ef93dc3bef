"""One key-value bucket: values that are replaced by compare-and-set, and may expire.

Reads and writes `$KV.<bucket>.*`. Promises: of several writers that saw the same revision one wins, the others get SequenceConflict; a
write whose answer was lost is sent again and counts once.
"""

import secrets
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from ..schemas.streams import BucketSpec
from ..schemas.subjects import last_token
from .connection import Bus, RawMessage
from .jetstream import SEQUENCE_HEADER, SUBJECT_HEADER, bucket_stream, is_present, key_subject, newest_message, stored_page
from .publish import Publisher

_PAGE = 256


@dataclass(frozen=True, slots=True)
class Entry:
    """`revision`: what an update must name."""

    key: str
    value: bytes
    revision: int


class Bucket:
    """Keys are single subject tokens."""

    def __init__(self, bus: Bus, publisher: Publisher, spec: BucketSpec) -> None:
        self._bus = bus
        self._publisher = publisher
        self._name = spec.name
        self._stream = bucket_stream(spec.name)

    async def get(self, key: str) -> Entry | None:
        message = await newest_message(self._bus, self._stream, self._subject(key))
        return _entry(message) if message is not None and is_present(message) else None

    async def create(self, key: str, value: bytes, ttl_s: int | None = None) -> Entry:
        """Raises SequenceConflict when the key is there."""
        return await self._write(key, value, 0, ttl_s)

    async def update(self, entry: Entry, value: bytes, ttl_s: int | None = None) -> Entry:
        """Raises SequenceConflict when the key has another revision by now, or is gone."""
        return await self._write(entry.key, value, entry.revision, ttl_s)

    async def entries(self) -> AsyncGenerator[Entry]:
        """All, the one that was written longest ago first."""
        first_sequence = 1
        while True:
            page = await stored_page(self._bus, self._stream, self._subject(">"), first_sequence, _PAGE)
            for message in page:
                if is_present(message):
                    yield _entry(message)
            if len(page) < _PAGE:
                return
            first_sequence = int(page[-1].headers[SEQUENCE_HEADER]) + 1

    async def _write(self, key: str, value: bytes, revision: int, ttl_s: int | None) -> Entry:
        stored = await self._publisher.store_bytes(
            self._subject(key), value, message_id=secrets.token_hex(12), first_only=True, after_sequence=revision, ttl_s=ttl_s
        )
        return Entry(key, value, stored.sequence)

    def _subject(self, key: str) -> str:
        return key_subject(self._name, key)


def _entry(message: RawMessage) -> Entry:
    return Entry(last_token(message.headers[SUBJECT_HEADER]), message.data, int(message.headers[SEQUENCE_HEADER]))
