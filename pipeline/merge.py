"""Puts the replies of one request in order, whatever the network and several attempts did to them. Pure.

Reads chunks and the terminal in any order; gives them without gap or repeat. The highest attempt wins; offsets already given
are dropped; what comes too early waits; the terminal brings what is missing, and nothing comes after it.
"""

from ..schemas.replies import AnyTerminal, Cancelled, Expired, Failed, Finished, Terminal, TokenChunk
from ..schemas.tokens import token_count

MAX_WAITING_CHUNKS = 1024


class ReplyMerge:
    """One request. `length_tokens`: output tokens given so far."""

    def __init__(self, start_tokens: int = 0) -> None:
        """`start_tokens`: what the reader has already, when it resumes."""
        self.length_tokens = start_tokens
        self.ended = False
        self._attempt = 0
        self._early: dict[int, TokenChunk] = {}

    def feed(self, reply: TokenChunk | AnyTerminal) -> list[TokenChunk | AnyTerminal]:
        """What the reader may see now, in order."""
        if self.ended:
            return []
        return [*self._take_chunk(reply)] if isinstance(reply, TokenChunk) else self._take_terminal(reply)

    def _take_chunk(self, chunk: TokenChunk) -> list[TokenChunk]:
        if chunk.attempt < self._attempt:
            return []
        if chunk.attempt > self._attempt:
            self._attempt = chunk.attempt
            self._early.clear()
        if chunk.offset > self.length_tokens:
            self._wait(chunk)
            return []
        given = self._advance(chunk)
        while ready := [offset for offset in self._early if offset <= self.length_tokens]:
            for offset in sorted(ready):
                given += self._advance(self._early.pop(offset))
        return given

    def _wait(self, chunk: TokenChunk) -> None:
        known = self._early.get(chunk.offset)
        if known is None or len(known.tokens) < len(chunk.tokens):
            self._early[chunk.offset] = chunk
        if len(self._early) > MAX_WAITING_CHUNKS:  # the terminal repeats all tokens, so the farthest can go
            del self._early[max(self._early)]

    def _advance(self, chunk: TokenChunk) -> list[TokenChunk]:
        rest = tail(chunk, self.length_tokens)
        if rest is None:
            return []
        self.length_tokens += token_count(rest.tokens)
        return [rest]

    def _take_terminal(self, terminal: Finished | Failed | Cancelled | Expired) -> list[TokenChunk | AnyTerminal]:
        self.ended = True
        self._early.clear()
        return [*self._advance(whole(terminal)), terminal]


def tail(chunk: TokenChunk, offset: int) -> TokenChunk | None:
    """The part of `chunk` from `offset` on, or None when it has nothing there."""
    had = offset - chunk.offset
    if had >= token_count(chunk.tokens):
        return None
    if had == 0:
        return chunk
    return chunk.model_copy(update={"offset": offset, "tokens": chunk.tokens[4 * had :], "logprobs": chunk.logprobs[had:]})


def whole(terminal: Terminal) -> TokenChunk:
    """All output tokens of a terminal as one chunk; its log probabilities only when there is one for each token."""
    complete = len(terminal.logprobs) == token_count(terminal.tokens)
    logprobs = terminal.logprobs if complete else []
    return TokenChunk(request_id=terminal.request_id, attempt=terminal.attempt, offset=0, tokens=terminal.tokens, logprobs=logprobs)
