"""One answer on its way out: engine outputs in, token chunks to `jw.replies.<gateway>.<request>`, and the words for its end.

The tokens in `given` were sent to the client by somebody else (the prefill worker, an earlier attempt) and are not sent again, but
they count for the terminal, which repeats every token. Now and then all tokens so far go to `jw.answers.*`, from where another
worker continues if this one dies. An engine that is faster than `GATHER_S` a token has several of them in one chunk.
"""

import asyncio
import logging
from collections.abc import Sequence

from ..pipeline.checkpoints import checkpoint
from ..pipeline.publish import Publisher
from ..schemas import subjects
from ..schemas.errors import AnswerDiverged, BrokerUnavailable, BusError, EngineRefused
from ..schemas.replies import Finished, PositionLogprobs, TokenChunk
from ..schemas.requests import InferenceRequest
from ..schemas.tokens import token_count
from .engine import EngineOutput, FinishReason

logger = logging.getLogger(__name__)

GATHER_S = 0.005
"""How long a chunk waits for more tokens when another went out just before: nobody reads 200 chunks a second."""
CHECKPOINT_EVERY_S = 0.5
CHECKPOINT_EVERY_TOKENS = 64
CHECKPOINT_AT_MOST_EVERY_S = 0.1
LEAST_GROWTH = 16
"""A checkpoint repeats all tokens: none before they grew by one in so many, so that all of them stay within so many times the answer."""


class Answer:
    def __init__(self, publisher: Publisher, request: InferenceRequest, given: bytes = b"") -> None:
        self._publisher = publisher
        self.request = request
        self._subject = subjects.reply(request.gateway, request.request_id)
        self._given = given
        self._sent = token_count(given)
        self._kept = self._sent
        self._clock = asyncio.get_running_loop().time
        self._kept_at_s = self._clock()
        self._sent_at_s = self._kept_at_s - GATHER_S
        self._later: asyncio.Task[None] | None = None
        self.tokens = b""
        self.logprobs: list[PositionLogprobs] = []
        self.last: EngineOutput | None = None

    def stamp(self, **times_ns: int) -> None:
        """These moments of the request's timeline are known now."""
        self.request = self.request.stamped(**times_ns)

    @property
    def has_new(self) -> bool:
        """Whether there is a token that nobody gave before."""
        return len(self.tokens) > len(self._given)

    @property
    def given_tokens(self) -> int:
        return token_count(self._given)

    async def add(self, output: EngineOutput) -> None:
        """Takes the next output and sends what of it is new to the client. Raises AnswerDiverged when it is not what was given before."""
        expected = self._given[len(self.tokens) : len(self.tokens) + len(output.tokens)]
        if not output.tokens.startswith(expected):
            raise AnswerDiverged("the engine did not repeat the tokens that were given before")
        self.last = output
        self.tokens += output.tokens
        self.logprobs.extend(output.logprobs)
        if self._clock() - self._sent_at_s >= GATHER_S:
            await self._send_new()
        elif output.finish_reason is None and self._later is None and len(self.tokens) > 4 * self._sent:
            self._later = asyncio.create_task(self._send_later())
        # Else they go with the chunk that waits, or with the terminal, which comes at once.

    async def _send_later(self) -> None:
        await asyncio.sleep(self._sent_at_s + GATHER_S - self._clock())
        self._later = None
        try:
            await self._send_new()
        except BusError as error:  # as above: what was not sent goes with the next output, or with the terminal
            logger.warning("%s: tokens not sent now: %s", self.request.request_id, error)

    async def aclose(self) -> None:
        """The engine has ended: what waits goes with the terminal."""
        if self._later is not None:
            self._later.cancel()

    async def _send_new(self) -> None:
        assert self.last is not None
        offset, tokens = self._sent, self.tokens
        try:
            await self.send(offset, tokens[4 * offset :], self.logprobs[offset:], self.last.cached_tokens if offset == 0 else None)
            self._sent = max(offset, token_count(tokens))
            if self.last.finish_reason is None and self._is_worth_keeping():
                self._kept, self._kept_at_s = self._sent, self._clock()
                await checkpoint(self._publisher, self.request, self.tokens)
        except BrokerUnavailable:
            return  # too much was sent since the connection broke: it goes with the next output, or with the terminal

    def _is_worth_keeping(self) -> bool:
        new, age_s = self._sent - self._kept, self._clock() - self._kept_at_s
        due = age_s >= CHECKPOINT_EVERY_S or (new >= CHECKPOINT_EVERY_TOKENS and age_s >= CHECKPOINT_AT_MOST_EVERY_S)
        return due and new > 0 and new * LEAST_GROWTH >= self._kept

    async def send(self, offset: int, tokens: bytes, logprobs: Sequence[PositionLogprobs], cached_tokens: int | None = None) -> None:
        if tokens:
            self._sent_at_s = self._clock()
            chunk = TokenChunk(
                request_id=self.request.request_id,
                attempt=self.request.attempt,
                offset=offset,
                tokens=tokens,
                logprobs=list(logprobs),
                cached_tokens=cached_tokens,
            )
            await self._publisher.send(self._subject, chunk)

    def finished(self, prefill_worker: str, decode_worker: str, predicted_cached_tokens: int) -> Finished:
        """The terminal of an answer whose last output named a reason. Raises EngineRefused when none did: that is no answer.

        Raises AnswerDiverged when it ended before the end of what was given.
        """
        if self.last is None or self.last.finish_reason is None:
            raise EngineRefused("the engine ended the answer without saying why")
        if len(self.tokens) < len(self._given):
            raise AnswerDiverged("the engine ended the answer before the end of what was given")
        return finished(
            self.request,
            self.tokens,
            self.last.finish_reason,
            logprobs=self.logprobs,
            stop_reason=self.last.stop_reason,
            cached_tokens=self.last.cached_tokens,
            predicted_cached_tokens=predicted_cached_tokens,
            prefill_worker=prefill_worker,
            decode_worker=decode_worker,
            kv_bytes=self.last.kv_bytes,
            kv_transfer_s=self.last.transfer_s,
        )


def finished(
    request: InferenceRequest,
    tokens: bytes,
    finish_reason: FinishReason,
    *,
    logprobs: Sequence[PositionLogprobs] = (),
    stop_reason: str = "",
    cached_tokens: int = 0,
    predicted_cached_tokens: int = 0,
    prefill_worker: str = "",
    decode_worker: str = "",
    kv_bytes: int = 0,
    kv_transfer_s: float = 0.0,
) -> Finished:
    return Finished(
        request_id=request.request_id,
        model=request.model,
        attempt=request.attempt,
        tokens=tokens,
        logprobs=list(logprobs),
        prompt_length_tokens=request.prompt_length_tokens,
        cached_tokens=cached_tokens,
        predicted_cached_tokens=predicted_cached_tokens,
        prefill_worker=prefill_worker,
        decode_worker=decode_worker,
        kv_bytes=kv_bytes,
        kv_transfer_s=kv_transfer_s,
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        text_rules=request.sampling.text_rules,
    )
