"""Ends requests: exactly one terminal each, whoever tries.

Writes `jw.results.*` by compare-and-set, then (the winner only) `jw.replies.*` and `jw.events.*`; and `jw.dead.*`. Promises: `end` returns True
for exactly one caller of a request; no attempt below a stored fence can end it; the terminal is in the store before anybody sees
it live; one that is too large for the broker shrinks rather than goes missing.
"""

import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..schemas import signals, subjects
from ..schemas.codec import decode, encode
from ..schemas.errors import BrokerUnavailable, BusError, PayloadTooLarge, RequestSuperseded, SequenceConflict
from ..schemas.events import request_ended
from ..schemas.replies import AnyTerminal, DeadLetter, Failed, Fence, Outcome
from ..schemas.requests import InferenceRequest
from ..schemas.streams import RESULTS
from . import instruments
from .clock import Clock
from .connection import Bus
from .jetstream import SEQUENCE_HEADER, newest_message
from .publish import Publisher

logger = logging.getLogger(__name__)

_OUTCOME: Any = Outcome  # a union, which type checkers do not take for a class
_TRIES = 20
_ANY_ATTEMPT = 1 << 30


@dataclass(frozen=True, slots=True)
class ReplyTarget:
    """Whom to tell, for who has no request to name them by. `model` may be the name or its subject token."""

    model: str
    gateway: str
    request_id: str


@dataclass(frozen=True, slots=True)
class Claimed:
    """What stood before what was stored: nothing (0), or the fence of an earlier attempt."""

    after_sequence: int
    from_attempt: int


class Terminals:
    def __init__(self, bus: Bus, publisher: Publisher, clock: Clock) -> None:
        self._bus = bus
        self._publisher = publisher
        self._clock = clock
        self._writer = secrets.token_hex(6)
        self._written = 0

    def now_ns(self) -> int:
        """Server time, as far as whoever made this knows it."""
        return self._clock.now_ns()

    async def end(self, request: InferenceRequest | ReplyTarget, terminal: AnyTerminal) -> bool:
        """True: this terminal is the request's end. False: it had ended already, or a later attempt is the one that may end it.

        Raises BusError when neither is known.
        """
        stamps: dict[str, object] = {"ended_ns": terminal.ended_ns or self._clock.now_ns()}
        if isinstance(request, InferenceRequest):
            stamps |= {"submitted_ns": request.submitted_ns, "times": request.times}
        terminal = terminal.model_copy(update=stamps)
        subject = subjects.result(request.model, request.gateway, request.request_id)
        # Who cannot even read the request knows nothing of attempts, and nobody else will end it.
        attempt = request.attempt if isinstance(request, InferenceRequest) else _ANY_ATTEMPT
        for candidate in shrinking(terminal):
            try:
                before = await self._claim(subject, candidate, request.request_id, attempt + 1)
            except PayloadTooLarge:
                continue
            if isinstance(before, Claimed):
                await self._tell_live(subjects.reply(request.gateway, request.request_id), encode(candidate))
                await self._tell_event(request, candidate)
                code = candidate.code if isinstance(candidate, Failed) else ""
                self._log(candidate)
                instruments.add(signals.REQUESTS_ENDED, 1, candidate.type, code)
            return isinstance(before, Claimed)
        raise PayloadTooLarge(f"not even a failed terminal for {request.request_id} fits into a message")

    def _log(self, terminal: AnyTerminal) -> None:
        why = f"{terminal.code}: {terminal.text}" if isinstance(terminal, Failed) else f"{len(terminal.tokens) // 4} tokens"
        level = logging.WARNING if isinstance(terminal, Failed) else logging.DEBUG
        about = {"request_id": terminal.request_id, "attempt": terminal.attempt, "worker": terminal.decode_worker}
        logger.log(level, "%s: %s, %s", terminal.request_id, terminal.type, why, extra=about)

    async def fence(self, request: InferenceRequest) -> int:
        """From here on only this attempt or a later one can end the request, and nobody else has this attempt.

        Gives the attempt that had it before. Raises RequestSuperseded when the request has ended or moved on already, and BusError.
        """
        subject = subjects.result(request.model, request.gateway, request.request_id)
        fence = Fence(request_id=request.request_id, attempt=request.attempt)
        before = await self._claim(subject, fence, request.request_id, request.attempt)
        if isinstance(before, Claimed):
            return before.from_attempt
        raise RequestSuperseded(f"attempt {before.attempt} of {request.request_id} has {'moved on' if before.type == 'fence' else 'ended'}")

    async def _claim(
        self, subject: str, message: AnyTerminal | Fence, request_id: str, below_attempt: int
    ) -> "Claimed | AnyTerminal | Fence":
        """Stores it as the subject's next message unless a terminal, or a fence that is not below this attempt, is there: then that one."""
        claimed = Claimed(after_sequence=0, from_attempt=1)
        for _ in range(_TRIES):
            # An id of this very store: what another writer stored must meet the compare-and-set, not be taken for a resend of ours.
            self._written += 1
            message_id = subjects.message_id(request_id, f"{message.type}-{self._writer}-{self._written}", message.attempt)
            try:
                await self._publisher.store_bytes(
                    subject, encode(message), message_id=message_id, first_only=True, after_sequence=claimed.after_sequence
                )
            except SequenceConflict:
                there, sequence = await self._last(subject)
                if there is not None and not (isinstance(there, Fence) and there.attempt < below_attempt):
                    return there
                claimed = Claimed(sequence, there.attempt if there else 1)
            else:
                return claimed
        raise BrokerUnavailable(f"{subject} changes faster than it can be written")

    async def _last(self, subject: str) -> tuple[AnyTerminal | Fence | None, int]:
        message = await newest_message(self._bus, RESULTS.name, subject)
        return (decode(message.data, _OUTCOME), int(message.headers[SEQUENCE_HEADER])) if message else (None, 0)

    async def _tell_event(self, request: InferenceRequest | ReplyTarget, terminal: AnyTerminal) -> None:
        event = request_ended(terminal, request.gateway, request if isinstance(request, InferenceRequest) else None)
        await self._tell_live(subjects.event(request.model, event.outcome), event.model_dump_json().encode())

    async def _tell_live(self, subject: str, payload: bytes) -> None:
        try:
            await self._bus.publish(subject, payload)
        except BusError as error:  # it is stored, and readers that hear nothing look there
            logger.warning("the end on %s is stored but was not sent live: %s", subject, error)

    async def has_ended(self, request: InferenceRequest) -> bool:
        """Whether the store has a terminal of it, whoever wrote that, or a later attempt goes on elsewhere. Raises BusError."""
        there, _ = await self._last(subjects.result(request.model, request.gateway, request.request_id))
        return there is not None and not (isinstance(there, Fence) and there.attempt <= request.attempt)

    async def dead_letter(self, letter: DeadLetter, headers: Mapping[str, str] | None = None) -> None:
        """Keeps a message for an operator; one too large for a second envelope is kept without its payload."""
        if letter.dead_ns == 0:
            letter = letter.model_copy(update={"dead_ns": self._clock.now_ns()})
        subject = subjects.dead(letter.stage)
        instruments.add(signals.DEAD_LETTERS, 1, letter.stage)
        self._written += 1
        message_id = f"{self._writer}:dead:{self._written}"
        try:
            await self._publisher.store(subject, letter, message_id=message_id, headers=headers)
        except PayloadTooLarge:
            note = f"{letter.text} (payload of {len(letter.payload)} bytes left out)"
            bare = letter.model_copy(update={"payload": b"", "text": note})
            await self._publisher.store(subject, bare, message_id=message_id, headers=headers)


def shrinking(terminal: AnyTerminal) -> tuple[AnyTerminal, ...]:
    """The terminal, then without log probabilities, then a failure that says so."""
    text = f"the answer of {len(terminal.tokens) // 4} tokens is larger than one message of the broker may be"
    failed = Failed(
        request_id=terminal.request_id, model=terminal.model, attempt=terminal.attempt, ended_ns=terminal.ended_ns,
        submitted_ns=terminal.submitted_ns, times=terminal.times,
        prefill_worker=terminal.prefill_worker, decode_worker=terminal.decode_worker, code=PayloadTooLarge.code, text=text,
    )  # fmt: skip
    return terminal, terminal.model_copy(update={"logprobs": []}), failed
