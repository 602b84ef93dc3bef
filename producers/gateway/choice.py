"""One answer of one of our requests: replies in, vLLM's outputs out. Imports vLLM.

vLLM's own output processor turns tokens into text and finds stop strings. Promises: a token that ends the answer is never shown
as text, however the replies were cut; an answer ends with the reason its workers gave, or with the stop string found here.
"""

from itertools import repeat

import numpy as np
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists

from ...schemas.errors import DeadlineExceeded, RequestCancelled, RequestFailed
from ...schemas.replies import AnyTerminal, Cancelled, Expired, Failed, Finished, PositionLogprobs, TokenChunk
from ...schemas.tokens import unpack_tokens

_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
_ABSENT = float("-inf")


class Choice:
    """`engine_id` is the id under which the output processor knows it. `ended`: no reply changes it any more."""

    def __init__(self, processor: OutputProcessor, engine_id: str, params: SamplingParams, prompt_length_tokens: int) -> None:
        self.ended = False
        self.stopped_here = False
        self.given_tokens = 0
        self._processor = processor
        self._engine_id = engine_id
        self._params = params
        self._prompt_length_tokens = prompt_length_tokens
        # vLLM fills this set in for every request.
        self._end_tokens: set[int] = params._all_stop_token_ids  # pyright: ignore[reportPrivateUsage]
        self._begun = False
        self._cached_tokens = 0
        self._held_tokens: list[int] = []
        self._held_logprobs: list[PositionLogprobs] = []

    def take(self, reply: TokenChunk | AnyTerminal, hold: bool = False) -> list[RequestOutput]:
        """What vLLM's front end gets to see now. Raises RequestFailed, RequestCancelled or DeadlineExceeded for such an ending.

        `hold`: the end is the next reply and is there: tokens come with it, in one output.
        """
        if isinstance(reply, TokenChunk):
            return self._tokens(reply, hold)
        if isinstance(reply, Finished):
            return self._finish(reply)
        raise error_of(reply)

    def _tokens(self, chunk: TokenChunk, hold: bool) -> list[RequestOutput]:
        tokens, logprobs = [*self._held_tokens, *unpack_tokens(chunk.tokens)], [*self._held_logprobs, *chunk.logprobs]
        if tokens and (hold or (tokens[-1] in self._end_tokens and not self._params.ignore_eos)):
            # Else: perhaps the last one. Whether it is text or an ending, only the next reply can say.
            self._held_tokens, self._held_logprobs = tokens, logprobs
            self._note(chunk.cached_tokens)
            return []
        self._held_tokens, self._held_logprobs = [], []
        return self._process(tokens, logprobs, chunk.cached_tokens)

    def _finish(self, terminal: Finished) -> list[RequestOutput]:
        reason = _REASONS[terminal.finish_reason]
        return self._process(self._held_tokens, self._held_logprobs, terminal.cached_tokens, reason, self._stop_reason(terminal))

    def _note(self, cached_tokens: int | None) -> None:
        if cached_tokens is not None and not self._begun:
            self._cached_tokens = cached_tokens

    def _process(
        self,
        tokens: list[int],
        logprobs: list[PositionLogprobs],
        cached_tokens: int | None,
        reason: FinishReason | None = None,
        stop_reason: int | str | None = None,
    ) -> list[RequestOutput]:
        output = EngineCoreOutput(
            request_id=self._engine_id,
            new_token_ids=tokens,
            new_logprobs=logprobs_of(logprobs, self._params.logprobs) if logprobs and self._params.logprobs is not None else None,
            finish_reason=reason,
            stop_reason=stop_reason,
        )
        if not self._begun:
            self._note(cached_tokens)
            self._begun = True
            output.prefill_stats = PrefillStats(num_prompt_tokens=self._prompt_length_tokens, num_cached_tokens=self._cached_tokens)
        self.given_tokens += len(tokens)
        processed = self._processor.process_outputs([output])
        self.stopped_here = bool(processed.reqs_to_abort)
        self.ended = reason is not None or self.stopped_here
        return [made for made in processed.request_outputs if isinstance(made, RequestOutput)]

    def _stop_reason(self, terminal: Finished) -> int | str | None:
        """As vLLM says it: the stop string, the id of a stop token, or nothing for the end of the sequence."""
        given = terminal.stop_reason
        if not given or given in (self._params.stop or ()):
            return given or None
        return int(given) if given.isdigit() else given


def error_of(terminal: Failed | Cancelled | Expired) -> RequestFailed | RequestCancelled | DeadlineExceeded:
    if isinstance(terminal, Failed):
        return RequestFailed(terminal.text, terminal.code)
    if isinstance(terminal, Cancelled):
        return RequestCancelled(f"{terminal.request_id} was cancelled")
    return DeadlineExceeded(f"{terminal.request_id}: {terminal.phase or 'its deadline passed'}")


def logprobs_of(positions: list[PositionLogprobs], count: int) -> LogprobsLists:
    """As vLLM's engine sends them: at each position the drawn token first, then the `count` likeliest in order of rank."""
    rows = [_row(position, count) for position in positions]
    return LogprobsLists(
        np.array([[token for token, _ in row] for row in rows], dtype=np.int64),
        np.array([[logprob for _, logprob in row] for row in rows], dtype=np.float64),
        np.array([position.ranks[0] for position in positions], dtype=np.int64),
    )


def _row(position: PositionLogprobs, count: int) -> list[tuple[int, float]]:
    given = list(zip(position.token_ids, position.logprobs, position.ranks, strict=True))
    drawn = given[0]
    ranked = sorted((entry for entry in given if entry[2] <= count), key=lambda entry: entry[2])[:count]
    row = [(drawn[0], drawn[1]), *((token, logprob) for token, logprob, _ in ranked)]
    # An engine that gave fewer than were asked for: repeat the drawn one, which says nothing new.
    return [*row, *repeat(row[0], count + 1 - len(row))]
