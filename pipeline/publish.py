"""Storing messages in streams, with the broker's word for it.

Writes to JetStream subjects. Promises: `store` returns only when the broker has the message, exactly once under its id; an
unknown outcome (no answer, lost connection) is sent again under the same id until `publish_deadline_s`; every refusal is one
of our errors, at once.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from ..schemas.codec import Message, encode
from ..schemas.errors import BrokerUnavailable, SequenceConflict, StreamMissing
from ..schemas.subjects import EXPECTED_LAST_SUBJECT_SEQUENCE_HEADER, MESSAGE_ID_HEADER
from .backoff import backoff_s
from .connection import Bus
from .jetstream import SEQUENCE_HEADER, TTL_HEADER, api, last_message, parse_answer


@dataclass(frozen=True, slots=True)
class Stored:
    """`duplicate`: the broker had this id already; with `resent`, that may have been an earlier send of this very call."""

    sequence: int
    duplicate: bool
    resent: bool = False


class Publisher:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def send(self, subject: str, message: Message, headers: Mapping[str, str] | None = None) -> None:
        """Plain publish: live listeners get it, nobody confirms it."""
        await self._bus.publish(subject, encode(message), headers)

    async def store(
        self,
        subject: str,
        message: Message,
        *,
        message_id: str,
        headers: Mapping[str, str] | None = None,
        first_only: bool = False,
        ttl_s: int | None = None,
    ) -> Stored:
        """Publish with the broker's acknowledgement.

        Raises StreamFull, StreamMissing, PayloadTooLarge, NotPermitted, BusRejected; SequenceConflict when `first_only` and the
        subject has a message already; BrokerUnavailable when the outcome is still unknown at the deadline.
        """
        return await self.store_bytes(subject, encode(message), message_id=message_id, headers=headers, first_only=first_only, ttl_s=ttl_s)

    async def store_bytes(
        self,
        subject: str,
        payload: bytes,
        *,
        message_id: str = "",
        headers: Mapping[str, str] | None = None,
        first_only: bool = False,
        ttl_s: int | None = None,
    ) -> Stored:
        """As `store`, for bytes. Without a message id a resent message may be stored twice: for last-value subjects only."""
        all_headers = dict(headers or {})
        if message_id:
            all_headers[MESSAGE_ID_HEADER] = message_id
        if first_only:
            all_headers[EXPECTED_LAST_SUBJECT_SEQUENCE_HEADER] = "0"
        if ttl_s is not None:
            all_headers[TTL_HEADER] = str(ttl_s)
        return await self._store(subject, payload, all_headers)

    async def _store(self, subject: str, payload: bytes, headers: dict[str, str]) -> Stored:
        clock = asyncio.get_running_loop().time
        started, failures, unsure = clock(), 0, False
        while True:
            try:
                answer = parse_answer(await self._bus.request(subject, payload, headers), f"storing on {subject}")
                return Stored(int(answer["seq"]), bool(answer.get("duplicate", False)), unsure)
            except SequenceConflict:
                ours = await self._find_own(subject, headers) if unsure else None
                if ours is None:
                    raise
                return ours
            except BrokerUnavailable:
                unsure, patience_s = True, self._bus.settings.publish_deadline_s
                if clock() - started >= patience_s:
                    raise
            except StreamMissing:  # so says a broker that is still loading its streams after a restart, too
                patience_s = min(self._bus.settings.missing_grace_s, self._bus.settings.publish_deadline_s)
                if clock() - started >= patience_s:
                    raise
            failures += 1
            await asyncio.sleep(min(backoff_s(failures, cap_s=1.0), max(0.0, started + patience_s - clock())))

    async def _find_own(self, subject: str, headers: Mapping[str, str]) -> Stored | None:
        """Whether what stands on the subject is our own earlier send whose answer was lost, when the broker forgot its id."""
        names: list[str] = (await api(self._bus, "STREAM.NAMES", {"subject": subject})).get("streams") or []
        for stream in names:
            last = await last_message(self._bus, stream, subject)
            if last is not None and last.headers.get(MESSAGE_ID_HEADER) == headers.get(MESSAGE_ID_HEADER, ""):
                return Stored(int(last.headers[SEQUENCE_HEADER]), True, True)
        return None
