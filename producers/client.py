"""The client SDK: puts requests on the queue and gives answers back, from any asyncio program.

    async with Client.connect("nats://127.0.0.1:4222") as client:
        answer = await client.generate("The capital of France is", max_tokens=8)
        async for piece in client.stream([{"role": "user", "content": "Hello"}]):
            print(piece.text, end="")

Writes `jw.requests.<model>.<class>` and `jw.cancel.<request>`, reads `jw.replies.<client>.>` and `jw.results`. Promises: a request
that `submit` returned is stored; its answer ends with `Submitted.answer`, or with an error that says how it ended instead. One that may be
stored and of which nobody can hear, because whoever sent it was cancelled meanwhile, is cancelled too.
"""

import asyncio
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from opentelemetry.trace import SpanKind
from pydantic import ValidationError

from ..pipeline.checkpoints import announce
from ..pipeline.clock import ServerClock
from ..pipeline.connection import Bus
from ..pipeline.publish import Publisher
from ..pipeline.recall import find
from ..pipeline.registry import ModelCatalogue
from ..pipeline.replies import ReplyInbox, ReplyStream
from ..pipeline.settings import BrokerSettings
from ..pipeline.submit import cancel_request, store_request
from ..pipeline.tracing import Root
from ..schemas import subjects
from ..schemas.codec import decode, encode, first_complaint
from ..schemas.errors import (
    BrokerUnavailable,
    BusError,
    InvalidRequest,
    JetwakeError,
    NoWorker,
    Overloaded,
    StreamMissing,
    UnknownModel,
)
from ..schemas.replies import AnyTerminal
from ..schemas.requests import InferenceRequest, PriorityClass, Sampling
from ..schemas.routing import Explain, Explanation
from ..schemas.timeline import Timeline
from ..schemas.tokens import pack_tokens
from ..schemas.workers import ModelCard
from .admission import admit
from .overload import OverloadEstimate
from .reading import Answer, Piece, Reading
from .root_ends import end_root
from .text import ChatMessage, TextCodec, TextStream, load_text_codec

Prompt = str | Sequence[int] | Sequence[ChatMessage]
"""Text, token ids, or chat messages."""
DEFAULT_MAX_TOKENS = 256
LEAVING_S = 1.0
"""How long somebody who leaves is kept until the order to cancel is stored. Where the broker is away, it goes out later."""


class Submitted(Reading):
    """A request on its way. Iterate it for the pieces as they come; `answer` waits for the end."""

    def __init__(self, client: "Client", request: InferenceRequest, replies: ReplyStream, text: TextStream, root: Root) -> None:
        super().__init__(replies, text, client.now_ns)
        self.request = request
        self._client = client
        self._root = root

    async def cancel(self) -> None:
        await self._client.cancel(self.request_id)

    async def abandon(self) -> None:
        await self.cancel()

    def left(self, terminal: AnyTerminal | None) -> None:
        end_root(self._root, terminal)


class Client:
    """Made by `Client.connect`. Any number of requests at once, over one connection and one reply subscription."""

    def __init__(self, bus: Bus, name: str) -> None:
        self.name = name
        self.default_model: str | None = None
        self._bus = bus
        self._publisher = Publisher(bus)
        self._catalogue = ModelCatalogue(bus, self._publisher)
        self._clock = ServerClock(bus)
        self._inbox = ReplyInbox(bus, name, self._clock)
        self._overload = OverloadEstimate(bus)
        self._models: dict[str, ModelCard] = {}
        self._codecs: dict[str, TextCodec] = {}
        self._leaving: set[asyncio.Task[None]] = set()

    @classmethod
    @asynccontextmanager
    async def connect(cls, broker: BrokerSettings | str | None = None, name: str | None = None) -> "AsyncGenerator[Client]":
        """`broker`: a URL or full settings. `name`: whose replies these are; two clients must not share one. Else that of the settings.

        Raises BrokerUnavailable, StreamMissing (nothing ever ran here: start `jetwake up`).
        """
        settings = BrokerSettings(url=broker) if isinstance(broker, str) else broker or BrokerSettings()
        name = name or settings.name or f"client-{secrets.token_hex(6)}"
        async with Bus.connect(settings, name=name) as bus:
            client = cls(bus, name)
            await client._clock.sync()
            await client._inbox.start()
            try:
                yield client
            finally:
                await client._finish_leaving()

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
        UnknownModel (before anything is sent), Overloaded (try again later), BrokerUnavailable. Being cancelled meanwhile cancels the
        request. After BrokerUnavailable it may be accepted all the same: with a `request_id` of your own, `resume` tells; another is cancelled.
        """
        request = await self.prepare(prompt, **options)
        return await self._publish(request, await self._text_stream(request), has_own_id=bool(options.get("request_id")))

    async def submit_request(self, request: InferenceRequest) -> Submitted:
        """`submit` for a request that is made already. Its replies come here only if its gateway is this client's name."""
        await self._model(request.model)
        return await self._publish(request, await self._text_stream(request), has_own_id=True)

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
        cancel_when_unread: bool = False,
        **sampling: Any,
    ) -> InferenceRequest:
        """The request as it would be published. `prompt`: text, token ids, or chat messages; `sampling`: the fields of `Sampling`.

        `model`: else `default_model`, else the only one there is. `cancel_when_unread`: should this process die, the request is
        cancelled some seconds later; without it, it goes on, and its end waits in the store. Raises InvalidRequest, PromptTooLong, UnknownModel.
        """
        received_ns = self.now_ns()
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
                cancel_when_unread=cancel_when_unread,
                submitted_ns=now_ns,
                times=Timeline(received_ns=received_ns),
                deadline_ns=now_ns + int(timeout_s * 1e9),
            )
        except ValidationError as error:
            raise InvalidRequest(first_complaint(error)) from error
        except OverflowError as error:
            raise InvalidRequest(f"a token id of the prompt is negative or too large: {error}") from error
        admit(request, card)
        return request

    async def resume(self, request_id: str, after: int = 0) -> Reading:
        """A request that was sent before, by whomever: its pieces from token offset `after` on, those that are kept and those to come.

        Text goes on where the text of the first `after` tokens ended. While a request runs, and for minutes after, any offset is
        there; for a day after its end, too. Raises UnknownRequest when nothing is kept of it, and BrokerUnavailable.
        """
        if after < 0:
            raise InvalidRequest(f"a token offset is 0 or more, not {after}")
        found = await find(self._bus, request_id)
        codec, rules = await self._codec(await self._model(found.model)), found.text_rules
        text = TextStream(codec, rules.stop, rules.include_stop_str_in_output, rules.skip_special_tokens)
        replies = await self._inbox.resume(found.gateway, request_id, found.model, found.deadline_ns)
        return Reading(replies, text, self.now_ns, after)

    async def stream(self, prompt: Prompt, *, after: int | None = None, **options: Any) -> AsyncIterator[Piece]:
        """`submit`, and the pieces as they come. Leaving the loop early cancels the request.

        With `after`, `prompt` is the id of a request that was sent before: `resume`, and leaving the loop leaves the request alone.
        """
        if after is not None:
            if not isinstance(prompt, str) or options:
                raise InvalidRequest(
                    "with `after`, the first argument is the id of a request that was sent before, and there are no options"
                )
            async for piece in await self.resume(prompt, after):
                yield piece
            return
        submitted = await self.submit(prompt, **options)
        ended = False
        try:
            async for piece in submitted:
                yield piece
            ended = True
        finally:
            if not ended:
                await self._leave(submitted.request_id)

    async def generate(self, prompt: Prompt, **options: Any) -> Answer:
        """`submit` and wait for the end. When the waiting is cancelled, so is the request."""
        submitted = await self.submit(prompt, **options)
        try:
            return await submitted.answer()
        except asyncio.CancelledError:
            await self._leave(submitted.request_id)
            raise

    async def cancel(self, request_id: str) -> None:
        """Whoever holds the request ends it; a request that has ended already stays as it ended."""
        await cancel_request(self._publisher, request_id)

    async def _leave(self, request_id: str) -> None:
        """Cancels a request of which nobody will hear, in a task of its own: whoever leaves may be cancelled once more."""

        async def order() -> None:
            with suppress(BusError):  # cut off: then it runs to its end, or until its deadline
                await self.cancel(request_id)

        task = asyncio.create_task(order())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
        await asyncio.wait({task}, timeout=LEAVING_S)

    async def _finish_leaving(self) -> None:
        """A broker that is away is not waited for any longer than for anything else when a connection is closed."""
        if self._leaving:
            await asyncio.wait(self._leaving, timeout=self._bus.settings.request_timeout_s)
        for task in self._leaving:
            task.cancel()

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

    async def _publish(self, request: InferenceRequest, text: TextStream, *, has_own_id: bool) -> Submitted:
        """`has_own_id`: whoever asks can find the request again when this fails."""
        root = Root(self.now_ns, request.times.received_ns or self.now_ns(), SpanKind.CLIENT)
        request = root.carried_by(request)
        replies = self._inbox.open(request.request_id, request.model, request.deadline_ns)
        sent_s = time.perf_counter()
        try:
            await store_request(self._publisher, request)
            await announce(self._publisher, request)
        except Overloaded as error:
            replies.close()
            root.end(error_code=error.code, error_text=str(error))
            wait_s = await self._overload.retry_after_s()
            raise Overloaded(f"try again in {wait_s:.0f} s: {error}", wait_s) from error
        except BaseException as error:
            replies.close()
            root.end(error_code=error.code if isinstance(error, JetwakeError) else JetwakeError.code, error_text=str(error))
            if isinstance(error, asyncio.CancelledError) or (isinstance(error, BrokerUnavailable) and not has_own_id):
                await self._leave(request.request_id)  # it may be stored
            raise
        submitted = Submitted(self, request, replies, text, root)
        submitted.sent_s = sent_s
        return submitted

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
