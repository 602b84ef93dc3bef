"""Puts the replies of one request in order, whatever the network and several attempts did to them. Pure.

Reads chunks and the terminal in any order; gives them without gap or repeat. The highest attempt wins; offsets already given
are dropped; what comes too early waits; the terminal brings what is missing, and nothing comes after it. What comes again is
compared with what was given: an answer that goes on otherwise ends as failed, and never as if nothing had happened.
"""

from ..schemas.errors import AnswerDiverged
from ..schemas.replies import AnyTerminal, Cancelled, Expired, Failed, Finished, Terminal, TokenChunk
from ..schemas.tokens import token_count

MAX_WAITING_CHUNKS = 1024


class ReplyMerge:
    """One request. `tokens`: all output tokens given so far."""

    def __init__(self) -> None:
        self.tokens = bytearray()
        self.ended = False
        self._attempt = 0
        self._early: dict[int, TokenChunk] = {}

    @property
    def length_tokens(self) -> int:
        return len(self.tokens) // 4

    @property
    def has_gap(self) -> bool:
        """Whether something is missing before what has come already."""
        return bool(self._early)

    def feed(self, reply: TokenChunk | AnyTerminal) -> list[TokenChunk | AnyTerminal]:
        """What the reader may see now, in order."""
        if self.ended:
            return []
        return self._take_chunk(reply) if isinstance(reply, TokenChunk) else self._take_terminal(reply)

    def _take_chunk(self, chunk: TokenChunk) -> list[TokenChunk | AnyTerminal]:
        if chunk.attempt < self._attempt:
            return []
        if chunk.attempt > self._attempt:
            self._attempt = chunk.attempt
            self._early.clear()
        if chunk.offset > self.length_tokens:
            self._wait(chunk)
            return []
        given = self._advance(chunk)
        while ready := [offset for offset in self._early if offset <= self.length_tokens]:  # none are left once it has ended
            given += self._advance(self._early.pop(min(ready)))
        return given

    def _wait(self, chunk: TokenChunk) -> None:
        known = self._early.get(chunk.offset)
        if known is None or len(known.tokens) < len(chunk.tokens):
            self._early[chunk.offset] = chunk
        if len(self._early) > MAX_WAITING_CHUNKS:  # the terminal repeats all tokens, so the farthest can go
            del self._early[max(self._early)]

    def _advance(self, chunk: TokenChunk) -> list[TokenChunk | AnyTerminal]:
        if self.ended:
            return []
        known = bytes(self.tokens[4 * chunk.offset : 4 * chunk.offset + len(chunk.tokens)])
        if not chunk.tokens.startswith(known):
            return self._diverge(chunk.request_id, chunk.attempt)
        rest = tail(chunk, self.length_tokens)
        if rest is None:
            return []
        self.tokens += rest.tokens
        return [rest]

    def _diverge(self, request_id: str, attempt: int) -> list[TokenChunk | AnyTerminal]:
        """For this reader the request has failed, however it ends for others."""
        self.ended = True
        self._early.clear()
        text = f"attempt {attempt} gave other tokens than those you were given before; ask again, with a seed if answers must repeat"
        return [Failed(request_id=request_id, attempt=attempt, code=AnswerDiverged.code, text=text)]

    def _take_terminal(self, terminal: Finished | Failed | Cancelled | Expired) -> list[TokenChunk | AnyTerminal]:
        self._early.clear()
        if isinstance(terminal, Finished) and len(terminal.tokens) < len(self.tokens):
            return self._diverge(terminal.request_id, terminal.attempt)
        given = self._advance(whole(terminal))
        if not self.ended:
            self.ended = True
            given.append(terminal)
        return given


def tail(chunk: TokenChunk, offset: int) -> TokenChunk | None:
    """The part of `chunk` from `offset` on, or None when it has nothing there."""
    had = offset - chunk.offset
    if had >= token_count(chunk.tokens):
        return None
    if had == 0:
        return chunk
    return chunk.model_copy(update={"offset": offset, "tokens": chunk.tokens[4 * had :], "logprobs": chunk.logprobs[had:]})


def joined(chunk: TokenChunk, following: TokenChunk) -> TokenChunk | None:
    """Both as one; None when they are not the same attempt's, side by side, with log probabilities for all tokens or for none."""
    beside = chunk.attempt == following.attempt and chunk.offset + token_count(chunk.tokens) == following.offset
    if not beside or not chunk.tokens or bool(chunk.logprobs) != bool(following.logprobs):
        return None
    return chunk.model_copy(update={"tokens": chunk.tokens + following.tokens, "logprobs": [*chunk.logprobs, *following.logprobs]})


def whole(terminal: Terminal) -> TokenChunk:
    """All output tokens of a terminal as one chunk; its log probabilities only when there is one for each token."""
    complete = len(terminal.logprobs) == token_count(terminal.tokens)
    logprobs = terminal.logprobs if complete else []
    return TokenChunk(
        request_id=terminal.request_id,
        attempt=terminal.attempt,
        offset=0,
        tokens=terminal.tokens,
        logprobs=logprobs,
        cached_tokens=terminal.cached_tokens,
    )
