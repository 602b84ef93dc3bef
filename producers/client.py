"""The client SDK: puts requests on the queue and gives answers back, from any asyncio program.

    async with Client.connect("nats://127.0.0.1:4222") as client:
        answer = await client.generate("The capital of France is", max_tokens=8)
        async for piece in client.stream([{"role": "user", "content": "Hello"}]):
            print(piece.text, end="")

Writes `jw.requests.<model>.<class>` and `jw.cancel.<request>`, reads `jw.replies.<client>.>` and `jw.results`. Promises: a request
that `submit` returned is stored; its answer ends with `Submitted.answer`, or with an error that says how it ended instead.
"""

import asyncio
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from ..pipeline.clock import ServerClock
from ..pipeline.connection import Bus
from ..pipeline.publish import Publisher
from ..pipeline.registry import ModelCatalogue
from ..pipeline.replies import ReplyInbox, ReplyStream
from ..pipeline.settings import BrokerSettings
from ..schemas import subjects
from ..schemas.codec import decode, encode, first_complaint
from ..schemas.errors import (
    BrokerUnavailable,
    DeadlineExceeded,
    InvalidRequest,
    NoWorker,
    Overloaded,
    RequestCancelled,
    RequestFailed,
    StreamFull,
    StreamMissing,
    UnknownModel,
)
from ..schemas.replies import Cancelled, CancelRequest, Expired, Failed, Finished, PositionLogprobs, TokenChunk
from ..schemas.requests import InferenceRequest, PriorityClass, Sampling
from ..schemas.routing import Explain, Explanation
from ..schemas.tokens import pack_tokens, unpack_tokens
from ..schemas.workers import ModelCard
from .admission import admit
from .text import ChatMessage, TextCodec, TextStream, load_text_codec

Prompt = str | Sequence[int] | Sequence[ChatMessage]
"""Text, token ids, or chat messages."""
DEFAULT_MAX_TOKENS = 256
LOCAL_GRACE_S = 5.0
"""How long past its deadline a request is waited for: its expiry is told by whoever holds it."""


@dataclass(frozen=True)
class Piece:
    """New tokens of an answer. `text` may be empty while a character or a possible stop string is incomplete."""

    text: str
    token_ids: list[int]
    logprobs: Sequence[PositionLogprobs] = ()


@dataclass(frozen=True)
class Answer:
    """A finished answer. Times are this client's own: from just before publishing to the first token, and to the end."""

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


class Submitted:
    """A request on its way. Iterate it for the pieces as they come; `answer` waits for the end."""

    def __init__(self, client: "Client", request: InferenceRequest, replies: ReplyStream, text: TextStream, sent_s: float) -> None:
        self.request = request
        self._client = client
        self._replies = replies
        self._text = text
        self._sent_s = sent_s
        self._first_s: float | None = None
        self._answer: Answer | None = None

    @property
    def request_id(self) -> str:
        return self.request.request_id

    async def cancel(self) -> None:
        await self._client.cancel(self.request_id)

    async def answer(self) -> Answer:
        """Raises RequestFailed, RequestCancelled or DeadlineExceeded when that is how the request ended."""
        if self._answer is None:
            async for _ in self:
                pass
        if self._answer is None:
            raise RequestFailed("the pieces of this request were read elsewhere, and their end was not", "internal")
        return self._answer

    async def __aiter__(self) -> AsyncIterator[Piece]:
        remaining_s = (self.request.deadline_ns - self._client.now_ns()) / 1e9 + LOCAL_GRACE_S if self.request.deadline_ns else None
        scope = asyncio.timeout(remaining_s)
        try:
            async with scope:
                async for reply in self._replies:
                    if isinstance(reply, TokenChunk):
                        yield self._piece(reply)
                    else:
                        if rest := self._text.finish():
                            yield Piece(rest, [])
                        self._answer = self._end(reply)
        except TimeoutError:
            if not scope.expired():
                raise
            raise DeadlineExceeded(f"no ending of {self.request_id} was heard by its deadline") from None
        finally:
            self._replies.close()

    def _piece(self, chunk: TokenChunk) -> Piece:
        if self._first_s is None:
            self._first_s = time.perf_counter()
        token_ids = unpack_tokens(chunk.tokens)
        return Piece(self._text.add(token_ids), token_ids, chunk.logprobs)

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
            ttft_ms=((self._first_s or ended_s) - self._sent_s) * 1e3,
            total_ms=(ended_s - self._sent_s) * 1e3,
            attempts=terminal.attempt,
            predicted_cached_tokens=terminal.predicted_cached_tokens,
            logprobs=terminal.logprobs,
        )


class Client:
    """Made by `Client.connect`. Any number of requests at once, over one connection and one reply subscription."""

    def __init__(self, bus: Bus, name: str) -> None:
        self.name = name
        self.default_model: str | None = None
        self._bus = bus
        self._publisher = Publisher(bus)
        self._catalogue = ModelCatalogue(bus, self._publisher)
        self._clock = ServerClock(bus)
        self._inbox = ReplyInbox(bus, name)
        self._models: dict[str, ModelCard] = {}
        self._codecs: dict[str, TextCodec] = {}

    @classmethod
    @asynccontextmanager
    async def connect(cls, broker: BrokerSettings | str | None = None, name: str | None = None) -> "AsyncGenerator[Client]":
        """`broker`: a URL or full settings. `name`: whose replies these are; two clients must not share one.

        Raises BrokerUnavailable, StreamMissing (nothing ever ran here: start `jetwake up`).
        """
        settings = BrokerSettings(url=broker) if isinstance(broker, str) else broker or BrokerSettings()
        name = name or f"client-{secrets.token_hex(6)}"
        async with Bus.connect(settings, name=name) as bus:
            client = cls(bus, name)
            await client._clock.sync()
            await client._inbox.start()
            yield client

    def now_ns(self) -> int:
        """Server time."""
        return self._clock.now_ns()

    async def models(self) -> list[ModelCard]:
        return await self._catalogue.all()

    async def model(self, name: str | None = None) -> ModelCard:
        """That of this name; without one, the only model there is. Raises UnknownModel, InvalidRequest when there are several."""
        return await self._model(name or self.default_model)

    async def submit(self, prompt: Prompt, **options: Any) -> Submitted:
        """Publishes one request. `options`: those of `prepare`, and the fields of `Sampling`.

        When this returns, the request is accepted: it will end. Raises InvalidRequest, PromptTooLong, PayloadTooLarge,
        UnknownModel (before anything is sent), Overloaded (try again later), BrokerUnavailable.
        """
        request = await self.prepare(prompt, **options)
        return await self._publish(request, await self._text_stream(request))

    async def prepare(
        self,
        prompt: Prompt,
        *,
        model: str | None = None,
        timeout_s: float = 600.0,
        priority_class: PriorityClass = "interactive",
        request_id: str | None = None,
        lora: str = "",
        cache_salt: str = "",
        session: str = "",
        **sampling: Any,
    ) -> InferenceRequest:
        """The request as it would be published. `prompt`: text, token ids, or chat messages; `sampling`: the fields of `Sampling`.

        `model`: else `default_model`, else the only one there is. Raises InvalidRequest, PromptTooLong, UnknownModel.
        """
        card = await self._model(model or self.default_model)
        token_ids = encode_prompt(await self._codec(card), prompt)
        _refuse_unknown_sampling(sampling)
        sampling.setdefault("max_tokens", max(1, min(DEFAULT_MAX_TOKENS, card.max_model_len_tokens - len(token_ids))))
        now_ns = self.now_ns()
        try:
            request = InferenceRequest(
                request_id=request_id or uuid.uuid4().hex,
                gateway=self.name,
                model=card.model,
                priority_class=priority_class,
                prompt_tokens=pack_tokens(token_ids),
                sampling=Sampling(**sampling),
                lora=lora,
                cache_salt=cache_salt,
                session=session,
                submitted_ns=now_ns,
                deadline_ns=now_ns + int(timeout_s * 1e9),
            )
        except ValidationError as error:
            raise InvalidRequest(first_complaint(error)) from error
        except OverflowError as error:
            raise InvalidRequest(f"a token id of the prompt is negative or too large: {error}") from error
        admit(request, card)
        return request

    async def stream(self, prompt: Prompt, **options: Any) -> AsyncIterator[Piece]:
        """`submit`, and the pieces as they come. Leaving the loop early cancels the request."""
        submitted = await self.submit(prompt, **options)
        ended = False
        try:
            async for piece in submitted:
                yield piece
            ended = True
        finally:
            if not ended:
                await submitted.cancel()

    async def generate(self, prompt: Prompt, **options: Any) -> Answer:
        """`submit` and wait for the end."""
        submitted = await self.submit(prompt, **options)
        return await submitted.answer()

    async def cancel(self, request_id: str) -> None:
        """Whoever holds the request ends it; a request that has ended already stays as it ended."""
        await self._publisher.store(
            subjects.cancel(request_id),
            CancelRequest(request_id=request_id),
            message_id=subjects.message_id(request_id, "cancel", 1),
        )

    async def explain(self, prompt: Prompt | None = None, *, request_id: str = "", **options: Any) -> Explanation:
        """Why the request with this id went where it went, or where a request with this prompt would go now (nothing is sent).

        Raises what `prepare` raises, and NoWorker when no router answers: none runs, or none remembers this id.
        """
        request = None if prompt is None else await self.prepare(prompt, **options)
        question = Explain(request=request, request_id=request_id)
        try:
            answer = await self._bus.request(subjects.EXPLAIN, encode(question))
        except (BrokerUnavailable, StreamMissing) as error:
            what = f"remembers {request_id}" if request is None else "is running"
            raise NoWorker(f"no router {what}") from error
        return decode(answer.data, Explanation)

    async def _text_stream(self, request: InferenceRequest) -> TextStream:
        codec, sampling = await self._codec(self._models[request.model]), request.sampling
        return TextStream(codec, sampling.stop, sampling.include_stop_str_in_output, sampling.skip_special_tokens)

    async def _publish(self, request: InferenceRequest, text: TextStream) -> Submitted:
        replies = self._inbox.open(request.request_id, request.model)
        sent_s = time.perf_counter()
        try:
            await self._publisher.store(
                subjects.requests(request.model, request.priority_class),
                request,
                message_id=subjects.message_id(request.request_id, "request", request.attempt),
                headers={subjects.REQUEST_ID_HEADER: subjects.reply_target(request.model, request.gateway, request.request_id)},
            )
        except StreamFull as error:
            replies.close()
            raise Overloaded(f"the request queue is full: {error}") from error
        except BaseException:
            replies.close()
            raise
        return Submitted(self, request, replies, text, sent_s)

    async def _model(self, name: str | None) -> ModelCard:
        if name is not None and name in self._models:
            return self._models[name]
        known = await self._catalogue.all()
        self._models = {card.model: card for card in known}
        if name is None and len(known) == 1:
            return known[0]
        names = ", ".join(sorted(self._models)) or "none yet: is a worker running?"
        if name is None:
            raise InvalidRequest(f"which model? there are: {names}")
        if name not in self._models:
            raise UnknownModel(f"no model is called {name!r} here; there are: {names}")
        return self._models[name]

    async def _codec(self, card: ModelCard) -> TextCodec:
        if card.source not in self._codecs:
            self._codecs[card.source] = await asyncio.to_thread(load_text_codec, card.source)
        return self._codecs[card.source]


def encode_prompt(codec: TextCodec, prompt: Prompt) -> list[int]:
    """Text, token ids or chat messages as token ids. Raises InvalidRequest."""
    if isinstance(prompt, str):
        return codec.encode(prompt)
    if all(isinstance(part, int) for part in prompt):
        return [part for part in prompt if isinstance(part, int)]
    messages = [part for part in prompt if isinstance(part, dict)]
    if len(messages) != len(prompt):
        raise InvalidRequest("the prompt must be text, a list of token ids, or a list of chat messages")
    return codec.encode_chat(messages)


def _refuse_unknown_sampling(sampling: dict[str, Any]) -> None:
    unknown = sampling.keys() - Sampling.model_fields.keys()
    if unknown:
        raise InvalidRequest(f"unknown sampling option {sorted(unknown)[0]!r}; there are: {', '.join(sorted(Sampling.model_fields))}")
