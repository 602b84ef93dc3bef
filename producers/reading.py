"""The reader's side of one answer: replies become pieces of text, and at the end an answer or the error that says how it ended.

Reads a `ReplyStream`. Promises: the pieces are the answer, in order; a reader that begins at a later token gets what follows it, with
the text that belongs to it.
"""

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

from ..pipeline.replies import ReplyStream
from ..schemas.errors import AnswerDiverged, DeadlineExceeded, RequestCancelled, RequestFailed
from ..schemas.replies import AnyTerminal, Cancelled, Expired, Failed, Finished, PositionLogprobs, TokenChunk
from ..schemas.timeline import stages
from ..schemas.tokens import unpack_tokens
from .text import TextStream


@dataclass(frozen=True)
class Piece:
    """New tokens of an answer. `text` may be empty while a character or a possible stop string is incomplete.

    `logprobs`: none where they were not asked for, or not kept for a reader that came later; the answer has them all.
    """

    text: str
    token_ids: list[int]
    logprobs: Sequence[PositionLogprobs] = ()


@dataclass(frozen=True)
class Answer:
    """A finished answer. `ttft_ms` and `total_ms` are this client's own: from just before publishing to the first token, and to the end.

    `stages_s`: where the time went, by everybody's clock (`schemas.timeline`), and `delivery`, from the sending of the first token to
    this reader (a part of the time to first token, which runs beside the later stages); `end_delivery`: from the end, which is stored
    before it is told.
    """

    request_id: str
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str
    prompt_tokens: int
    cached_tokens: int
    prefill_worker: str
    decode_worker: str
    kv_bytes: int
    ttft_ms: float
    total_ms: float
    attempts: int
    predicted_cached_tokens: int = 0
    logprobs: list[PositionLogprobs] = field(default_factory=list[PositionLogprobs])
    stages_s: dict[str, float] = field(default_factory=dict[str, float])


class Reading:
    """An answer on its way. Iterate it for the pieces as they come; `answer` waits for the end and has all of it.

    `after`: pieces begin at this token offset. `now_ns` gives server time.
    """

    def __init__(self, replies: ReplyStream, text: TextStream, now_ns: Callable[[], int], after: int = 0) -> None:
        self.sent_s = time.perf_counter()
        self._replies = replies
        self._text = text
        self._now_ns = now_ns
        self._after = after
        self._first_s: float | None = None
        self._first_ns = 0
        self._answer: Answer | None = None

    @property
    def request_id(self) -> str:
        return self._replies.request_id

    async def answer(self) -> Answer:
        """Raises RequestFailed, RequestCancelled or DeadlineExceeded when that is how the request ended."""
        if self._answer is None:
            async for _ in self:
                pass
        if self._answer is None:
            raise RequestFailed("the pieces of this request were read elsewhere, and their end was not", "internal")
        return self._answer

    async def __aiter__(self) -> AsyncGenerator[Piece]:
        terminal: AnyTerminal | None = None
        try:
            async for reply in self._replies:
                if isinstance(reply, TokenChunk):
                    if piece := self._piece(reply):
                        yield piece
                else:
                    if isinstance(reply, Failed) and reply.code == AnswerDiverged.code:
                        await self.abandon()
                    if rest := self._text.finish():
                        yield Piece(rest, [])
                    terminal = reply
                    self._answer = self._end(reply)
        finally:
            self._replies.close()
            self.left(terminal)

    async def abandon(self) -> None:
        """For this reader the answer is broken. Whoever only reads along leaves it to those who asked."""

    def left(self, terminal: AnyTerminal | None) -> None:
        """Nobody reads on. `terminal`: how the request ended, as far as this reader heard."""

    def _piece(self, chunk: TokenChunk) -> Piece | None:
        """None for tokens before the offset: they only make the text before it."""
        if self._first_s is None:
            self._first_s, self._first_ns = time.perf_counter(), self._now_ns()
        token_ids = unpack_tokens(chunk.tokens)
        skipped = min(max(0, self._after - chunk.offset), len(token_ids))
        if skipped:
            self._text.add(token_ids[:skipped])
        if skipped == len(token_ids):
            return None
        return Piece(self._text.add(token_ids[skipped:]), token_ids[skipped:], chunk.logprobs[skipped:])

    def _end(self, terminal: Finished | Failed | Cancelled | Expired) -> Answer:
        if isinstance(terminal, Failed):
            raise RequestFailed(f"{terminal.code}: {terminal.text}", terminal.code)
        if isinstance(terminal, Cancelled):
            raise RequestCancelled(f"{self.request_id} was cancelled")
        if isinstance(terminal, Expired):
            raise DeadlineExceeded(f"{self.request_id}: {terminal.phase or 'its deadline passed'}")
        ended_s = time.perf_counter()
        return Answer(
            request_id=self.request_id,
            text=self._text.text,
            token_ids=unpack_tokens(terminal.tokens),
            finish_reason=terminal.finish_reason,
            stop_reason=terminal.stop_reason,
            prompt_tokens=terminal.prompt_length_tokens,
            cached_tokens=terminal.cached_tokens,
            prefill_worker=terminal.prefill_worker,
            decode_worker=terminal.decode_worker,
            kv_bytes=terminal.kv_bytes,
            ttft_ms=((self._first_s or ended_s) - self.sent_s) * 1e3,
            total_ms=(ended_s - self.sent_s) * 1e3,
            attempts=terminal.attempt,
            predicted_cached_tokens=terminal.predicted_cached_tokens,
            logprobs=terminal.logprobs,
            stages_s=self._stages_s(terminal),
        )

    def _stages_s(self, terminal: Finished) -> dict[str, float]:
        at = terminal.moments
        lengths: dict[str, float] = {**stages(at)}
        if self._first_ns and "first_token" in at and not self._after:
            lengths["delivery"] = max(0, self._first_ns - at["first_token"]) / 1e9
        if "ended" in at:
            lengths["end_delivery"] = max(0, self._now_ns() - at["ended"]) / 1e9
        return lengths
