"""API keys and the secret behind cache salts, in the bucket `jw_keys`: shared by all gateways, written by an operator.

Reads and writes `$KV.jw_keys.*`. Promises: of a key only its SHA-256 is ever sent or stored; the secret is made once, by whoever
comes first, and every gateway then has the same one.
"""

import logging
import secrets
from collections.abc import Callable

from ..schemas.codec import decode, encode
from ..schemas.errors import SequenceConflict, Undecodable
from ..schemas.keys import ApiKey
from ..schemas.streams import KEYS_BUCKET
from .connection import Bus, Subscription
from .jetstream import (
    KV_OPERATION_HEADER,
    ROLLUP_HEADER,
    SUBJECT_HEADER,
    bucket_stream,
    is_present,
    key_subject,
    last_messages,
    newest_message,
)
from .publish import Publisher

logger = logging.getLogger(__name__)

_STREAM = bucket_stream(KEYS_BUCKET.name)
_ALL_KEYS = key_subject(KEYS_BUCKET.name, "key.*")
_SECRET = key_subject(KEYS_BUCKET.name, "secret")


class KeyBucket:
    def __init__(self, bus: Bus, publisher: Publisher) -> None:
        self._bus = bus
        self._publisher = publisher

    async def put(self, key: ApiKey) -> None:
        await self._publisher.store_bytes(_subject(key.digest), encode(key))

    async def remove(self, digest: str) -> None:
        await self._publisher.store_bytes(_subject(digest), b"", headers={KV_OPERATION_HEADER: "PURGE", ROLLUP_HEADER: "sub"})

    async def all(self) -> list[ApiKey]:
        """By tenant. Raises Undecodable for an entry that is none: a key that cannot be read must not pass for one that is not there."""
        found: list[ApiKey] = []
        for message in await last_messages(self._bus, _STREAM, _ALL_KEYS):
            if is_present(message):
                try:
                    found.append(decode(message.data, ApiKey))
                except Undecodable as error:
                    raise Undecodable(f"{message.headers.get(SUBJECT_HEADER, '')} is no API key: {error}") from error
        return sorted(found, key=lambda key: (key.tenant, key.digest))

    async def secret(self) -> bytes:
        """Made when there is none."""
        message = await newest_message(self._bus, _STREAM, _SECRET)
        if message is not None and is_present(message):
            return message.data
        try:
            await self._publisher.store_bytes(_SECRET, made := secrets.token_bytes(32), first_only=True)
        except SequenceConflict:  # another gateway was first
            return await self.secret()
        return made

    async def on_change(self, callback: Callable[[], None]) -> Subscription:
        """`callback` runs in the loop when a key was added or removed."""
        return await self._bus.subscribe(_ALL_KEYS, lambda _: callback())


def _subject(digest: str) -> str:
    return key_subject(KEYS_BUCKET.name, f"key.{digest}")
