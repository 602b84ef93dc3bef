"""One function maps how a handler ended to what becomes of the message: the table of the whole pipeline. Pure.

returned                                     ack
cancelled, or deadline passed                ack (the handler told the client)
nobody can take it now                       nak, later, without limit
other retryable error, and it can be moved   ack; the next attempt is on its way to another worker
other retryable error, deliveries left       nak, later
other retryable error, last delivery         term; client told; dead letter
permanent error                              term; client told
a bug (any other exception)                  as a retryable error
shutting down                                nak at once; another worker continues
"""

import asyncio
from dataclasses import dataclass
from typing import Literal

from ..schemas.errors import (
    BrokerUnavailable,
    DeadlineExceeded,
    JetwakeError,
    NoWorker,
    Overloaded,
    RequestCancelled,
    RequestSuperseded,
    StreamFull,
    StreamMissing,
)
from .backoff import backoff_s

NOT_NOW = (NoWorker, Overloaded, StreamFull, BrokerUnavailable, StreamMissing)
ENDED = (RequestCancelled, RequestSuperseded, DeadlineExceeded)


@dataclass(frozen=True, slots=True)
class Settlement:
    """Before settling: `tell_client`: a failed terminal is sent. `dead_letter`: the message is kept for an operator. `move`: the
    request goes on as another attempt elsewhere.
    """

    kind: Literal["ack", "nak", "term"]
    delay_s: float = 0.0
    tell_client: bool = False
    dead_letter: bool = False
    move: bool = False


def settlement(error: BaseException | None, deliveries: int, max_deliveries: int, *, can_move: bool = False) -> Settlement:
    """`deliveries` counts this one, and not those that ended in "not now". `can_move`: another worker may try it at once."""
    if error is None or isinstance(error, ENDED):
        return Settlement("ack")
    if isinstance(error, asyncio.CancelledError):
        return Settlement("nak")
    if isinstance(error, NOT_NOW):
        return Settlement("nak", not_now_delay_s(error, deliveries))
    if isinstance(error, JetwakeError) and not error.retryable:
        return Settlement("term", tell_client=True)
    if can_move:
        return Settlement("ack", move=True)
    if deliveries < max_deliveries:
        return Settlement("nak", backoff_s(deliveries, first_s=0.25))
    return Settlement("term", tell_client=True, dead_letter=True)


def not_now_delay_s(error: JetwakeError, deliveries: int) -> float:
    """What the error asks for, else a short while that grows: a queue that moves again should not wait long."""
    if isinstance(error, Overloaded):
        return error.retry_after_s
    return backoff_s(deliveries, first_s=0.1, cap_s=2.0)
