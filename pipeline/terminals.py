"""Ends requests: exactly one terminal each, whoever tries.

Writes `jw.results.*` by compare-and-set, then (the winner only) `jw.replies.*`; and `jw.dead.*`. Promises: `end` returns True
for exactly one caller of a request; the terminal is in the store before anybody sees it live; one that is too large for the
broker shrinks rather than goes missing.
"""

import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from ..schemas import subjects
from ..schemas.codec import encode
from ..schemas.errors import BusError, PayloadTooLarge, SequenceConflict
from ..schemas.replies import AnyTerminal, DeadLetter, Failed
from ..schemas.requests import InferenceRequest
from ..schemas.streams import RESULTS
from .clock import Clock
from .connection import Bus
from .jetstream import last_message
from .publish import Publisher

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReplyTarget:
    """Whom to tell, for who has no request to name them by. `model` may be the name or its subject token."""

    model: str
    gateway: str
    request_id: str


class Terminals:
    def __init__(self, bus: Bus, publisher: Publisher, clock: Clock) -> None:
        self._bus = bus
        self._publisher = publisher
        self._clock = clock
        self._writer = secrets.token_hex(6)
        self._written = 0

    async def end(self, request: InferenceRequest | ReplyTarget, terminal: AnyTerminal) -> bool:
        """True: this terminal is the request's end. False: it had ended already. Raises BusError when neither is known."""
        if terminal.ended_ns == 0:
            terminal = terminal.model_copy(update={"ended_ns": self._clock.now_ns()})
        subject = subjects.result(request.model, request.gateway, request.request_id)
        live_subject = subjects.reply(request.gateway, request.request_id)
        # An id of this very call: another writer's terminal must meet the compare-and-set, not be taken for a resend of ours.
        self._written += 1
        message_id = subjects.message_id(request.request_id, f"terminal-{self._writer}-{self._written}", terminal.attempt)
        for candidate in shrinking(terminal):
            payload = encode(candidate)
            try:
                await self._publisher.store_bytes(subject, payload, message_id=message_id, first_only=True)
            except PayloadTooLarge:
                continue
            except SequenceConflict:
                return False
            await self._tell_live(live_subject, payload)
            return True
        raise PayloadTooLarge(f"not even a failed terminal for {request.request_id} fits into a message")

    async def _tell_live(self, subject: str, payload: bytes) -> None:
        try:
            await self._bus.publish(subject, payload)
        except BusError as error:  # it is stored, and readers that hear nothing look there
            logger.warning("the end on %s is stored but was not sent live: %s", subject, error)

    async def has_ended(self, request: InferenceRequest) -> bool:
        """Whether the store has a terminal of it, whoever wrote that. Raises BusError."""
        subject = subjects.result(request.model, request.gateway, request.request_id)
        return await last_message(self._bus, RESULTS.name, subject) is not None

    async def dead_letter(self, letter: DeadLetter, headers: Mapping[str, str] | None = None) -> None:
        """Keeps a message for an operator; one too large for a second envelope is kept without its payload."""
        if letter.dead_ns == 0:
            letter = letter.model_copy(update={"dead_ns": self._clock.now_ns()})
        subject = subjects.dead(letter.stage)
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
        prefill_worker=terminal.prefill_worker, decode_worker=terminal.decode_worker, code=PayloadTooLarge.code, text=text,
    )  # fmt: skip
    return terminal, terminal.model_copy(update={"logprobs": []}), failed
