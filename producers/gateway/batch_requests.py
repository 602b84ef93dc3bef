"""The requests of a batch's lines, sent so that whoever runs the batch later finds them: the same ids, and replies under one name.

Writes `jw.requests.<model>.batch` and `jw.cancel.<request>`; reads `jw.replies.batches.*` and what is kept of it. Promises: a request that
was surely accepted before is only read on; one of which that is not known is sent as a later attempt, which fences the earlier one.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from ...pipeline.checkpoints import announce
from ...pipeline.connection import Bus
from ...pipeline.merge import whole
from ...pipeline.publish import Publisher
from ...pipeline.recall import find
from ...pipeline.replies import ReplyInbox, ReplyStream
from ...pipeline.submit import cancel_earlier, cancel_request, store_request
from ...schemas.errors import Overloaded, UnknownRequest
from ...schemas.replies import AnyTerminal, Fence, Finished, TokenChunk
from ...schemas.requests import InferenceRequest
from ..batches.running import patiently
from .exchange import Replies


class WholeAnswer:
    """The replies of one request when its end is known: all tokens as one chunk, then the terminal.

    Nobody reads a line of a batch while it is made, and what comes in one piece costs the gateway little.
    """

    def __init__(self, replies: ReplyStream) -> None:
        self.request_id = replies.request_id
        self._replies = replies
        self.end_is_next = False

    def close(self) -> None:
        self._replies.close()

    async def __aiter__(self) -> AsyncIterator[TokenChunk | AnyTerminal]:
        async for reply in self._replies:
            if not isinstance(reply, TokenChunk):
                self.end_is_next = isinstance(reply, Finished) and reply.finish_reason == "length"
                if reply.tokens:
                    yield whole(reply)
                yield reply


@dataclass
class Sending:
    """Of one line. `unsure`: its requests may have been sent, by us or before us."""

    unsure: bool


class BatchRequests:
    """`inbox` is one that is shared."""

    def __init__(self, bus: Bus, publisher: Publisher, inbox: ReplyInbox) -> None:
        self._bus = bus
        self._publisher = publisher
        self._inbox = inbox

    @property
    def name(self) -> str:
        """Whose the replies are."""
        return self._inbox.gateway

    def of(self, sending: Sending) -> Callable[[InferenceRequest], Awaitable[Replies]]:
        """How the requests of one line are sent. Raises Overloaded and BusErrors."""

        async def submit(request: InferenceRequest) -> Replies:
            return WholeAnswer(await (self._again(request) if sending.unsure else self._first(request, sending)))

        return submit

    async def has_ended(self, request_id: str, model: str) -> bool:
        """Whether its end is stored: then asking again gives the same."""
        return (
            await patiently(lambda: self._inbox.lookup(model, self._inbox.gateway, request_id), f"the end of {request_id} is looked up")
            is not None
        )

    async def cancel(self, request_id: str, count: int) -> None:
        """All requests of a line, of which there are `count`."""
        for number in range(count):
            one = request_id if number == 0 else f"{request_id}-{number}"
            await cancel_request(self._publisher, one, "its batch was cancelled, or its time is over")

    async def _first(self, request: InferenceRequest, sending: Sending) -> ReplyStream:
        replies = await self._inbox.open_shared(request.request_id, request.model, request.deadline_ns)
        try:
            sending.unsure = True
            await store_request(self._publisher, request)
        except Overloaded:
            sending.unsure = False
            replies.close()
            raise
        except BaseException:
            replies.close()
            raise
        await announce(self._publisher, request)
        return replies

    async def _again(self, request: InferenceRequest) -> ReplyStream:
        """Listening before looking, so that nothing falls between."""
        replies = await self._inbox.resume(request.gateway, request.request_id, request.model, request.deadline_ns)
        try:
            ending = await self._inbox.outcome(request.model, request.gateway, request.request_id)
            if isinstance(ending, Fence) or (ending is None and not await self._is_known(request.request_id)):
                # Nothing says that an attempt is on its way, or which: a fence may be all that its sender got to.
                later = request.model_copy(update={"attempt": (ending.attempt if ending is not None else 1) + 1})
                await store_request(self._publisher, later)
                await cancel_earlier(self._publisher, later, "whoever runs its batch asks again")
                await announce(self._publisher, later)
        except BaseException:
            replies.close()
            raise
        return replies

    async def _is_known(self, request_id: str) -> bool:
        """Whether it was announced, which it is when it was accepted."""
        try:
            await find(self._bus, request_id, self._inbox.gateway)
        except UnknownRequest:
            return False
        return True
