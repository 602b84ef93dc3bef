"""Puts requests of this gateway on the queue and hears their replies: the producer side of the gateway, without vLLM.

Writes `jw.requests.<model>.<class>` and `jw.cancel.<request>`, reads `jw.replies.<gateway>.>` and `jw.results`. Promises: a
request that `submit` returned is stored and will end; a full queue is remembered for a moment, so that an overload costs nothing.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from ...pipeline.checkpoints import announce
from ...pipeline.clock import ServerClock
from ...pipeline.connection import Bus
from ...pipeline.publish import Publisher
from ...pipeline.replies import ReplyInbox, ReplyStream
from ...pipeline.submit import cancel_request, store_request
from ...schemas.codec import encode
from ...schemas.errors import BrokerUnavailable, BusError, JetwakeError, Overloaded, PayloadTooLarge
from ...schemas.requests import InferenceRequest
from ...schemas.workers import ModelCard
from ..admission import admit
from ..overload import OverloadEstimate

logger = logging.getLogger(__name__)

ENVELOPE_BYTES = 8192
"""A request travels on inside a job and a handoff, with the names of its KV blocks and its first log probabilities."""
BLOCK_NAME_BYTES = 5
BROKER_PATIENCE_S = 1.0
"""A connection that is away for less than this is waited for; after that, requests are refused at once."""


class Submitter:
    """`model` is the card of the one model this gateway serves."""

    def __init__(
        self, bus: Bus, publisher: Publisher, inbox: ReplyInbox, clock: ServerClock, model: ModelCard, retry_after_s: float = 1.0
    ) -> None:
        self.model = model
        self.gateway = inbox.gateway
        self.retry_after_s = retry_after_s
        self._bus = bus
        self._publisher = publisher
        self._inbox = inbox
        self._clock = clock
        self._full_until_s = 0.0
        self._full_text = ""
        self._full_wait_s = retry_after_s
        self._overload = OverloadEstimate(bus)
        self._connected_s = 0.0
        self._background: set[asyncio.Task[None]] = set()

    def now_ns(self) -> int:
        """Server time."""
        return self._clock.now_ns()

    def at_ns(self, monotonic_ns: int) -> int:
        """Server time when this machine's monotonic clock showed that."""
        return self._clock.at_ns(monotonic_ns)

    @property
    def connected(self) -> bool:
        return self._bus.connected

    def refusal(self) -> JetwakeError | None:
        """Why no request would be taken now, as far as is known without asking."""
        now_s = asyncio.get_running_loop().time()
        if self._bus.connected:
            self._connected_s = now_s
        elif now_s - self._connected_s > BROKER_PATIENCE_S:
            return BrokerUnavailable("the connection to the broker is lost: try again soon")
        if now_s < self._full_until_s:
            return Overloaded(self._full_text, self._full_wait_s)
        return None

    def check(self, request: InferenceRequest) -> None:
        """Raises InvalidRequest, PromptTooLong; PayloadTooLarge when the broker cannot carry it to the last stage."""
        admit(request, self.model)
        blocks = request.prompt_length_tokens // self.model.block_size_tokens + 1
        size = len(encode(request)) + ENVELOPE_BYTES + blocks * BLOCK_NAME_BYTES
        if size > self._bus.max_payload_bytes:
            raise PayloadTooLarge(
                f"a prompt of {request.prompt_length_tokens} tokens needs messages of {size} bytes; "
                f"the broker carries {self._bus.max_payload_bytes} (its max_payload)"
            )

    async def submit(self, request: InferenceRequest) -> ReplyStream:
        """Its replies. Raises Overloaded and BusErrors; the caller has called `check`."""
        replies = self._inbox.open(request.request_id, request.model, request.deadline_ns)
        try:
            await store_request(self._publisher, request)
        except Overloaded as error:
            replies.close()
            self._full_text = str(error)
            self._full_until_s = asyncio.get_running_loop().time() + self.retry_after_s
            self.in_background(self._estimate_wait())
            raise Overloaded(self._full_text, self._full_wait_s) from error
        except BaseException:
            replies.close()
            # It may have been stored all the same, and nobody waits for it any more.
            self.cancel_soon(request.request_id)
            raise
        self.in_background(announce(self._publisher, request))
        return replies

    async def _estimate_wait(self) -> None:
        """For refusals from now on: this one does not wait for it, or it would come too late to be a status."""
        self._full_wait_s = max(self.retry_after_s, await self._overload.retry_after_s())

    def cancel_soon(self, request_id: str) -> None:
        """Tells whoever holds the request to end it. For places that cannot wait."""
        self.in_background(self._cancel(request_id))

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def finish_background(self) -> None:
        """Returns when what `in_background` started is done."""
        while self._background:
            await asyncio.wait(self._background)

    async def _cancel(self, request_id: str) -> None:
        try:
            await cancel_request(self._publisher, request_id, "the client is gone, or has what it wanted")
        except BusError as error:
            logger.warning("%s was not cancelled and runs on: %s", request_id, error)
