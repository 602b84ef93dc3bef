"""What lets any gateway go on with a streamed response: what it was asked with, and who reads it now.

Writes and reads `jw.openai-bodies.<gateway>.<request>` and `jw.openai-readers.<request>`, and reads the replies of other gateways. All of it is
memory that is kept for minutes. Promises: of a request that one reader left, and another took up before the grace was over, the one
that was left does not end it.
"""

import asyncio
import logging
from collections.abc import Callable

from ...pipeline.connection import Bus
from ...pipeline.jetstream import last_message
from ...pipeline.publish import Publisher
from ...pipeline.raw import RawMessage
from ...pipeline.replies import ReplyInbox, ReplyStream
from ...schemas import subjects
from ...schemas.codec import decode
from ...schemas.errors import BrokerUnavailable, BusError, StreamMissing, UnknownRequest
from ...schemas.requests import InferenceRequest
from ...schemas.streamed import StreamedRequest
from ...schemas.streams import OPENAI_BODIES
from .streaming import Streaming

logger = logging.getLogger(__name__)

FIND_TRIES, FIND_PAUSE_S = 4, 0.1
"""A body is stored a moment after its request."""


class KeptStreams:
    """`rendering`, known when vLLM's application is made: how this gateway makes events of tokens."""

    def __init__(self, bus: Bus, publisher: Publisher, inbox: ReplyInbox, grace_s: float) -> None:
        self.rendering = ""
        self._bus = bus
        self._publisher = publisher
        self._inbox = inbox
        self._grace_s = grace_s

    async def keep(self, request: InferenceRequest, streaming: Streaming) -> None:
        """To be called when the request is accepted."""
        record = StreamedRequest(
            request_id=request.request_id,
            gateway=request.gateway,
            model=request.model,
            tenant=request.tenant,
            deadline_ns=request.deadline_ns,
            path=streaming.path,
            body=streaming.body,
            rendering=self.rendering,
        )
        try:
            await self._publisher.send(subjects.openai_body(request.gateway, request.request_id), record)
        except BusError as error:
            logger.warning("the stream of %s cannot be resumed: %s", request.request_id, error)

    async def find(self, request_id: str) -> StreamedRequest:
        """Of any gateway whose replies this one may read. Raises UnknownRequest, BusError."""
        settings = self._bus.settings
        names = [settings.name, *(name for name in settings.peers.split(",") if name and name != settings.name)] if settings.name else ["*"]
        for left in reversed(range(FIND_TRIES)):
            found: list[RawMessage | None] = []
            try:
                wanted = [subjects.openai_body(name, request_id) for name in names]
                found = await asyncio.gather(*(last_message(self._bus, OPENAI_BODIES.name, subject) for subject in wanted))
            except StreamMissing:  # a broker that was restarted has lost it, and somebody makes it anew
                pass
            except BrokerUnavailable:  # the grace may be over before this client asks again
                if not left:
                    raise
            for message in found:
                if message is not None:
                    return decode(message.data, StreamedRequest)
            await asyncio.sleep(FIND_PAUSE_S)
        raise unknown(request_id)

    async def claim(self, request_id: str, reader: str) -> None:
        """From now on `reader` is the one that counts."""
        await self._bus.publish(subjects.openai_reader(request_id), reader.encode())

    async def read_again(self, record: StreamedRequest) -> ReplyStream:
        """All replies, whoever is meant to get them. Raises BusError."""
        return await self._inbox.resume(record.gateway, record.request_id, record.model, record.deadline_ns, in_place_of_gateway=True)

    async def end_unless_taken_up(self, request_id: str, reader: str, end: Callable[[], None]) -> None:
        """For a reader that has gone: calls `end` when the grace is over and there is no other."""
        await asyncio.sleep(self._grace_s)
        try:
            message = await last_message(self._bus, OPENAI_BODIES.name, subjects.openai_reader(request_id))
        except BusError as error:
            logger.warning("whether somebody reads %s is not known: %s", request_id, error)
            message = None
        if message is None or message.data == reader.encode():
            end()


def unknown(request_id: str) -> UnknownRequest:
    """The same words for what never was, what is not kept any more, and what is somebody else's."""
    return UnknownRequest(f"no stream of a request {request_id} is kept: it ended too long ago, or its kind cannot be resumed")
