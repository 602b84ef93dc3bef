"""The n answers of one call of the gateway's engine: sent, heard, turned into vLLM's outputs, and ended when nobody wants them.

The first of n is sent alone, and the others when its first token has come. Writes and reads through `submission` and `kept_streams`.
Promises: what is left unfinished is cancelled at the workers, unless somebody may take it up. Imports vLLM.
"""

import asyncio
from collections.abc import AsyncGenerator
from copy import copy

from vllm.outputs import RequestOutput
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest

from ...schemas.errors import BrokerUnavailable, NotResumable
from ...schemas.replies import TokenChunk
from ...schemas.requests import InferenceRequest
from ...schemas.tokens import token_count
from .choice import Choice
from .exchange import Exchange, Replies
from .kept_streams import KeptStreams
from .metrics import Watched
from .positions import cut
from .stream_start import look_back_less
from .streaming import Streaming
from .submission import Submitter

LAST_WORD_S = 1.0
"""A worker finds a stop string itself and ends; only if it does not within this time is it told to."""


class Answers:
    """The n answers of one call of `generate`. `close` ends what has not ended."""

    def __init__(self, submitter: Submitter, processor: OutputProcessor, exchange: Exchange, kept: KeptStreams | None) -> None:
        self._submitter = submitter
        self._processor = processor
        self._exchange = exchange
        self._kept = kept
        self._quota_tokens = 0
        self._claimed = False
        self._requests: list[InferenceRequest] = []
        self._choices: list[Choice] = []
        self._engine_ids: list[str] = []
        self._streams: dict[int, Replies] = {}
        self._told: set[int] = set()
        self._collector: RequestOutputCollector | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def prepare(self, core: EngineCoreRequest, text: str | None, requests: list[InferenceRequest]) -> None:
        params = core.sampling_params
        assert params is not None
        self._requests = requests
        length = requests[0].prompt_length_tokens
        if params.n == 1:
            self._add(core, text, None, 0, length)
            return
        self._collector = RequestOutputCollector(params.output_kind, core.request_id)
        parent = ParentRequest(core)
        for number in range(params.n):
            child = copy(core)
            child.request_id, child.sampling_params = parent.get_child_info(number)
            self._add(child, text, parent, number, length)

    def take_quota(self, requests: list[InferenceRequest]) -> None:
        """By estimate: the prompt once, and all that the answers may become. Raises QuotaExceeded, InvalidRequest."""
        if self._exchange.grant is not None and not self._resumed:  # whoever began it has taken all that it may become
            wanted = requests[0].prompt_length_tokens + sum(request.sampling.max_tokens for request in requests)
            self._exchange.grant.take_tokens(wanted)
            self._quota_tokens = wanted

    def _add(self, core: EngineCoreRequest, text: str | None, parent: ParentRequest | None, number: int, length: int) -> None:
        params = core.sampling_params
        assert params is not None
        self._processor.add_request(core, text, parent, number, self._collector)
        look_back_less(self._processor, core)
        self._engine_ids.append(core.request_id)
        self._choices.append(Choice(self._processor, core.request_id, params, length))

    async def outputs(self) -> AsyncGenerator[RequestOutput, None]:
        if self._collector is None:
            async for output in self._answer(0):
                yield output
            return
        collector = self._collector
        self._tasks.append(asyncio.create_task(self._fan_out(collector)))
        finished = False
        while not finished:
            output = collector.get_nowait() or await collector.get()
            assert isinstance(output, RequestOutput)
            finished = output.finished
            yield output

    async def _answer(self, number: int, begun: asyncio.Event | None = None) -> AsyncGenerator[RequestOutput, None]:
        request, choice = self._requests[number], self._choices[number]
        awaited = number == 0 and request.priority_class != "batch" and (self._streaming is None or self._streaming.resumed is None)
        begun_ns = self._exchange.begun_monotonic_ns if awaited else 0
        replies = Watched(await self._ask(request), request.model, self._submitter.at_ns(1) - 1, begun_ns)
        self._streams[number] = replies
        if self._streaming is not None:
            async for output in self._numbered(request, choice, replies, self._streaming):
                yield output
        else:
            async for reply in replies:
                outputs = choice.take(reply, hold=replies.end_is_next)
                if begun is not None:
                    begun.set()
                for output in outputs:
                    yield output
                if choice.ended:
                    break
        if not choice.ended:
            raise BrokerUnavailable("the gateway stopped before the answer ended")
        if choice.stopped_here:
            self._told.add(number)
            self._submitter.in_background(_await_last_word(self._submitter, replies))

    async def _ask(self, request: InferenceRequest) -> Replies:
        streaming = self._streaming
        if self._exchange.job is not None:
            return await self._exchange.job.submit(request)
        if streaming is not None and streaming.resumed is not None and self._kept is not None:
            if streaming.arrived:
                await self._claim(streaming)
            return await self._kept.read_again(streaming.resumed)
        replies = await self._submitter.submit(request)
        if streaming is not None and self._kept is not None:
            self._submitter.in_background(self._kept.keep(request, streaming))
        return replies

    async def _numbered(
        self, request: InferenceRequest, choice: Choice, replies: Replies, streaming: Streaming
    ) -> AsyncGenerator[RequestOutput, None]:
        """As any other answer, and whoever numbers the events of an output hears before it where in the answer it ends."""
        pending = b""
        async for reply in replies:
            for part in cut(reply, streaming.by_token, streaming.cuts):
                if isinstance(part, TokenChunk):
                    if self._resumed and request.sampling.logprobs is not None and len(part.logprobs) != token_count(part.tokens):
                        raise NotResumable("the log probabilities of this stream are not kept any more: ask again")
                    pending += part.tokens
                at = part.offset + token_count(part.tokens) if isinstance(part, TokenChunk) else 0
                outputs = choice.take(part, hold=replies.end_is_next and not streaming.by_token and at not in streaming.cuts)
                if outputs:
                    streaming.given(choice.given_tokens, choice.ended, pending)
                    pending = b""
                    if streaming.resumed is not None and streaming.arrived and not self._claimed:
                        await self._claim(streaming)
                for output in outputs:
                    yield output
                if choice.ended:
                    return

    async def _claim(self, streaming: Streaming) -> None:
        """Not before it is known that this stream can go on: until then, it ends nothing for others."""
        assert self._kept is not None
        self._claimed = True
        await self._kept.claim(self._requests[0].request_id, streaming.reader)

    @property
    def _streaming(self) -> Streaming | None:
        """None for what cannot be resumed."""
        streaming = self._exchange.streaming
        return streaming if streaming is not None and not streaming.excluded else None

    @property
    def _resumed(self) -> bool:
        return self._exchange.streaming is not None and self._exchange.streaming.resumed is not None

    async def _fan_out(self, collector: RequestOutputCollector) -> None:
        """The first answer, and after its first token the others, all into the collector."""
        begun = asyncio.Event()

        async def one(number: int) -> None:
            async for _ in self._answer(number, begun):
                """The output processor has put it into the collector."""

        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(one(0))
                await begun.wait()
                for number in range(1, len(self._requests)):
                    tasks.create_task(one(number))
        except BaseExceptionGroup as group:
            first = group.exceptions[0]
            collector.put(first if isinstance(first, Exception) else RuntimeError(str(first)))

    def close(self) -> int:
        """The number of tokens that were given out. Never waits: it runs while a generator is being closed."""
        for task in self._tasks:
            task.cancel()
        unfinished = [number for number, choice in enumerate(self._choices) if not choice.ended]
        given = sum(choice.given_tokens for choice in self._choices)
        if self._resumed and not self._claimed:
            pass  # others read it
        elif unfinished and 0 in self._streams and self._may_be_taken_up():
            self._leave(given)
        else:
            for number in unfinished:
                if number in self._streams and self._exchange.job is None:
                    self._submitter.cancel_soon(self._requests[number].request_id)
            self._settle_quota(given)
        for number, replies in self._streams.items():
            if number not in self._told:
                replies.close()
        self._processor.abort_requests([self._engine_ids[number] for number in unfinished], internal=True)
        return given

    def _may_be_taken_up(self) -> bool:
        """A stream that broke off. One that failed is over."""
        return self._streaming is not None and self._kept is not None and self._exchange.failure is None

    def _leave(self, given: int) -> None:
        """Whoever resumes it in time goes on; then what it may become stays taken of the quota."""
        assert self._kept is not None
        assert self._streaming is not None
        request_id = self._requests[0].request_id

        def end() -> None:
            self._submitter.cancel_soon(request_id)
            self._settle_quota(given)

        self._submitter.in_background(self._kept.end_unless_taken_up(request_id, self._streaming.reader, end))

    def _settle_quota(self, given: int) -> None:
        if self._exchange.grant is not None and self._quota_tokens:
            # A prompt whose answers never began cost nothing.
            used = self._requests[0].prompt_length_tokens + given if given else 0
            self._exchange.grant.correct_tokens(self._quota_tokens, used)


async def _await_last_word(submitter: Submitter, replies: Replies) -> None:
    """A stop string was found here. The workers know it too; one that goes on regardless is told to stop."""
    try:
        async with asyncio.timeout(LAST_WORD_S):
            async for _ in replies:
                """Only its end is waited for."""
    except TimeoutError:
        submitter.cancel_soon(replies.request_id)
    finally:
        replies.close()
