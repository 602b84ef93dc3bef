"""Storing messages in streams, with the broker's word for it.

Writes to JetStream subjects. Promises: `store` returns only when the broker has the message, exactly once under its id; an
unknown outcome (no answer, lost connection) is sent again under the same id until `publish_deadline_s`; every refusal is one
of our errors, at once.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from ..schemas import signals
from ..schemas.codec import Message, encode
from ..schemas.errors import BrokerUnavailable, SequenceConflict, StreamMissing
from ..schemas.subjects import EXPECTED_LAST_SUBJECT_SEQUENCE_HEADER, MESSAGE_ID_HEADER
from . import instruments
from .backoff import backoff_s
from .connection import Bus
from .jetstream import SEQUENCE_HEADER, TTL_HEADER, newest_message, parse_json, refused
from .raw import RawMessage


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
        after_sequence: int = 0,
        ttl_s: int | None = None,
    ) -> Stored:
        """As `store`, for bytes. Without a message id a resent message may be stored twice: for last-value subjects only.

        `after_sequence`: as `first_only`, where the message with this sequence must be the subject's last.
        """
        all_headers = dict(headers or {})
        if message_id:
            all_headers[MESSAGE_ID_HEADER] = message_id
        if first_only or after_sequence:
            all_headers[EXPECTED_LAST_SUBJECT_SEQUENCE_HEADER] = str(after_sequence)
        if ttl_s is not None:
            all_headers[TTL_HEADER] = str(ttl_s)
        return await self._store(subject, payload, all_headers)

    async def _store(self, subject: str, payload: bytes, headers: dict[str, str]) -> Stored:
        clock = asyncio.get_running_loop().time
        started, failures, unsure = clock(), 0, False
        while True:
            try:
                answer = await self._bus.request(subject, payload, headers)
                stored = await self._judge(answer, subject, headers, unsure)
                instruments.record(signals.BUS_STORE_DURATION, clock() - started)
                return stored
            except BrokerUnavailable:
                unsure, patience_s = True, self._bus.settings.publish_deadline_s
                if clock() - started >= patience_s:
                    raise
            except StreamMissing:  # so says a broker that is still loading its streams after a restart, too
                patience_s = min(self._bus.missing_grace_s, self._bus.settings.publish_deadline_s)
                if clock() - started >= patience_s:
                    raise
            failures += 1
            await asyncio.sleep(min(backoff_s(failures, cap_s=1.0), max(0.0, started + patience_s - clock())))

    async def _judge(self, answer: RawMessage, subject: str, headers: Mapping[str, str], unsure: bool) -> Stored:
        """`unsure`: an earlier send of this message may have been stored, its answer lost."""
        fields = parse_json(answer, doing := f"storing on {subject}")
        if "error" not in fields:
            return Stored(int(fields["seq"]), bool(fields.get("duplicate", False)), resent=unsure)
        error = refused(fields["error"], doing)
        if unsure and isinstance(error, SequenceConflict):
            # The broker tests the expected sequence before the id, so a resend conflicts with our own earlier send.
            last = await newest_message(self._bus, str(fields.get("stream", "")), subject)
            if last is not None and last.headers.get(MESSAGE_ID_HEADER, "") == headers.get(MESSAGE_ID_HEADER):
                return Stored(int(last.headers[SEQUENCE_HEADER]), duplicate=True, resent=True)
        raise error
