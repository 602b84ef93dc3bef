"""One answer on its way out: engine outputs in, token chunks to `jw.replies.<gateway>.<request>`, and the words for its end.

Offsets below `already_sent` were given to the client by somebody else (the prefill worker's first token) and are not sent again,
but they count for the terminal, which repeats every token.
"""

from collections.abc import Sequence

from ..pipeline.publish import Publisher
from ..schemas import subjects
from ..schemas.errors import EngineRefused
from ..schemas.replies import Finished, PositionLogprobs, TokenChunk
from ..schemas.requests import InferenceRequest
from ..schemas.tokens import token_count
from .engine import EngineOutput, FinishReason


class Answer:
    def __init__(self, publisher: Publisher, request: InferenceRequest, already_sent: int = 0) -> None:
        self._publisher = publisher
        self._request = request
        self._subject = subjects.reply(request.gateway, request.request_id)
        self._already_sent = already_sent
        self.tokens = b""
        self.logprobs: list[PositionLogprobs] = []
        self.last: EngineOutput | None = None

    async def add(self, output: EngineOutput) -> None:
        """Takes the next output and sends what of it is new to the client."""
        offset = token_count(self.tokens)
        self.tokens += output.tokens
        self.logprobs.extend(output.logprobs)
        self.last = output
        skip = min(max(0, self._already_sent - offset), token_count(output.tokens))
        await self.send(offset + skip, output.tokens[4 * skip :], output.logprobs[skip:])

    async def send(self, offset: int, tokens: bytes, logprobs: Sequence[PositionLogprobs]) -> None:
        if tokens:
            chunk = TokenChunk(
                request_id=self._request.request_id,
                attempt=self._request.attempt,
                offset=offset,
                tokens=tokens,
                logprobs=list(logprobs),
            )
            await self._publisher.send(self._subject, chunk)

    def finished(self, prefill_worker: str, decode_worker: str, predicted_cached_tokens: int) -> Finished:
        """The terminal of an answer whose last output named a reason. Raises EngineRefused when none did: that is no answer."""
        if self.last is None or self.last.finish_reason is None:
            raise EngineRefused("the engine ended the answer without saying why")
        return finished(
            self._request,
            self.tokens,
            self.last.finish_reason,
            logprobs=self.logprobs,
            stop_reason=self.last.stop_reason,
            cached_tokens=self.last.cached_tokens,
            predicted_cached_tokens=predicted_cached_tokens,
            prefill_worker=prefill_worker,
            decode_worker=decode_worker,
            kv_bytes=self.last.kv_bytes,
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
        finish_reason=finish_reason,
        stop_reason=stop_reason,
    )
