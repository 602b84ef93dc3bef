"""What was given of an answer so far, read back from the broker: for the attempt that continues it, and for readers that come later.

Reads the last checkpoint (`jw.answers.*`), the chunks after it (`jw.replies.*`), and the outcome (`jw.results.*`). All but the
outcome is memory, kept for minutes: after a broker was lost there may be nothing, and readers then compare what they get.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..schemas import subjects
from ..schemas.codec import decode
from ..schemas.errors import StreamMissing, Undecodable, UnknownRequest
from ..schemas.replies import AnyTerminal, Checkpoint, Fence, Outcome, PositionLogprobs, Reply, Terminal, TokenChunk
from ..schemas.requests import InferenceRequest, TextRules
from ..schemas.streams import ANSWERS, REPLIES, RESULTS
from .clock import timestamp_ns
from .connection import Bus
from .jetstream import SUBJECT_HEADER, TIME_HEADER, last_message, stored_messages
from .merge import ReplyMerge
from .raw import RawMessage

logger = logging.getLogger(__name__)

_REPLY: Any = Reply  # unions, which type checkers do not take for classes
_OUTCOME: Any = Outcome

CHECKPOINT_MARGIN_NS = 1_000_000_000
"""Chunks after a checkpoint are looked for from so long before it: two streams store at their own pace."""
SUBMISSION_MARGIN_NS = 60_000_000_000
FIND_TRIES, FIND_PAUSE_S = 10, 0.1
FENCE_TRIES = 40
FENCE_PAUSE_S = 0.025


@dataclass(frozen=True)
class Given:
    """`logprobs`: one for each token, or none."""

    tokens: bytes = b""
    logprobs: Sequence[PositionLogprobs] = ()


@dataclass(frozen=True)
class Found:
    """A request that somebody else sent: where its replies go, and how to read them."""

    gateway: str
    model: str
    text_rules: TextRules
    deadline_ns: int = 0


async def given_before(bus: Bus, request: InferenceRequest, from_attempt: int) -> Given:
    """All that any reader may have seen of earlier attempts. `from_attempt`: the one whose fence stood before this one's.

    To be called when this attempt's own fence was sent on the reply subject: what readers can have seen was stored before it, so it
    is waited for here. Chunks that came after it are taken too, as far as they fit: readers dropped them, and get them again.
    """
    checkpoint, stored_ns = await _checkpoint(bus, request.gateway, request.request_id, from_attempt)
    since_ns = max(1, request.submitted_ns - SUBMISSION_MARGIN_NS) if request.submitted_ns else 0
    if checkpoint is not None and request.sampling.logprobs is None:
        since_ns = stored_ns - CHECKPOINT_MARGIN_NS
    merge, logprobs = ReplyMerge(), list[PositionLogprobs]()
    from_checkpoint = [] if checkpoint is None else [as_chunk(checkpoint)]
    chunks = await _chunks_up_to_fence(bus, request, since_ns)
    # A checkpoint has no log probabilities: where they matter it only fills what is missing among the chunks.
    for chunk in [*chunks, *from_checkpoint] if request.sampling.logprobs is not None else [*from_checkpoint, *chunks]:
        for new in merge.feed(chunk):
            if isinstance(new, TokenChunk):
                logprobs.extend(new.logprobs)
    complete = len(logprobs) == merge.length_tokens
    return Given(bytes(merge.tokens), tuple(logprobs) if complete else ())


async def _chunks_up_to_fence(bus: Bus, request: InferenceRequest, since_ns: int) -> list[TokenChunk]:
    """Those of earlier attempts."""
    subject = subjects.reply(request.gateway, request.request_id)
    chunks: list[TokenChunk] = []
    for _ in range(FENCE_TRIES):
        chunks = [reply for reply in await _replies(bus, subject, since_ns) if isinstance(reply, TokenChunk)]
        if any(chunk.attempt >= request.attempt for chunk in chunks):
            break
        await asyncio.sleep(FENCE_PAUSE_S)
    else:  # the stream drops what comes faster than it can store; readers compare, so this is no silent loss
        logger.warning("the fence of %s, attempt %d, was not found in %s", request.request_id, request.attempt, REPLIES.name)
    return [chunk for chunk in chunks if chunk.attempt < request.attempt]


async def kept_replies(bus: Bus, gateway: str, request_id: str, attempt: int, *, with_chunks: bool) -> list[TokenChunk | AnyTerminal]:
    """For a reader that missed some, or all: to be fed to its merge, in this order. `with_chunks` False: no more than one checkpoint.

    `attempt`: the one whose fence stands, else the first. Who may only read what is kept under its own name gets no chunks, which can
    only be read together with everybody's: the checkpoint is never older than half a second.
    """
    kept: list[TokenChunk | AnyTerminal] = []
    if with_chunks and not bus.settings.name:
        kept += await _replies(bus, subjects.reply(gateway, request_id), 0)
    checkpoint, _ = await _checkpoint(bus, gateway, request_id, attempt)
    if checkpoint is not None and checkpoint.tokens:
        kept.append(as_chunk(checkpoint))
    return kept


async def outcome(bus: Bus, model: str, gateway: str, request_id: str) -> AnyTerminal | Fence | None:
    """The stored terminal, or the fence of the attempt that goes on, or None. Raises BusError, Undecodable."""
    message = await last_message(bus, RESULTS.name, subjects.result(model, gateway, request_id))
    found: AnyTerminal | Fence | None = decode(message.data, _OUTCOME) if message is not None else None
    return found


async def find(bus: Bus, request_id: str, name: str = "") -> Found:
    """Where the replies of a request go, by its id alone. Raises UnknownRequest when nothing of it is kept, and BusError.

    Looks for a second: an announcement is stored a moment after the request is accepted. `name`: whose it is; else anybody's, as far as
    this user may look.
    """
    name = name or bus.settings.name or "*"
    for _ in range(FIND_TRIES):
        if found := await _find(bus, request_id, name):
            return found
        await asyncio.sleep(FIND_PAUSE_S)
    raise UnknownRequest(
        f"nothing is kept of a request {request_id}: it ended more than a day ago, was never accepted, or is not begun and was not sent"
        " by a Jetwake client"
    )


async def _find(bus: Bus, request_id: str, name: str) -> Found | None:
    message = await _last_checkpoint(bus, subjects.answers_of(name, request_id))
    if message is not None:
        checkpoint = decode(message.data, Checkpoint)
        gateway = message.headers[SUBJECT_HEADER].split(".")[2]
        return Found(gateway, checkpoint.model, checkpoint.text_rules, checkpoint.deadline_ns)
    message = await last_message(bus, RESULTS.name, subjects.results_of(request_id, name))
    if message is not None:
        ending: AnyTerminal | Fence = decode(message.data, _OUTCOME)
        if isinstance(ending, Terminal):
            gateway = message.headers[SUBJECT_HEADER].split(".")[3]
            return Found(gateway, ending.model, getattr(ending, "text_rules", TextRules()))
    return None


def as_chunk(checkpoint: Checkpoint) -> TokenChunk:
    return TokenChunk(request_id=checkpoint.request_id, attempt=max(1, checkpoint.attempt), offset=0, tokens=checkpoint.tokens)


async def _checkpoint(bus: Bus, gateway: str, request_id: str, attempt: int) -> tuple[Checkpoint | None, int]:
    """That of this attempt, and when it was stored."""
    message = await _last_checkpoint(bus, subjects.answer(gateway, request_id, attempt))
    return (None, 0) if message is None else (decode(message.data, Checkpoint), timestamp_ns(message.headers[TIME_HEADER]))


async def _last_checkpoint(bus: Bus, subject: str) -> RawMessage | None:
    try:
        return await last_message(bus, ANSWERS.name, subject)
    except StreamMissing:  # a broker that was restarted has lost it, and somebody makes it anew
        return None


async def _replies(bus: Bus, subject: str, since_ns: int) -> list[TokenChunk | AnyTerminal]:
    try:
        messages = await stored_messages(bus, REPLIES.name, subject, since_ns=since_ns)
    except StreamMissing:
        return []
    return [reply for message in messages if (reply := _readable(message))]


def _readable(message: RawMessage) -> TokenChunk | AnyTerminal | None:
    """Anybody may publish on a reply subject: what is no reply is not ours."""
    try:
        reply: TokenChunk | AnyTerminal = decode(message.data, _REPLY)
    except Undecodable as error:
        logger.warning("a stored reply cannot be read: %s", error)
        return None
    return reply
