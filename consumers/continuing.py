"""What an attempt must know before its first token: what earlier attempts gave, which it repeats and goes on from.

Writes the fence of a new attempt (`jw.results.*`, then `jw.replies.*`), a notice to whoever still holds an earlier one
(`jw.cancel.*`), and again the tokens that were given. Promises: of all legs of all attempts of a request, whatever readers take is a
beginning of what the attempt gives that ends it; where memory of it was lost with a broker, readers find out and say so.
"""

import logging
from collections import OrderedDict
from typing import Literal

from ..pipeline.about import about
from ..pipeline.checkpoints import checkpoint
from ..pipeline.connection import Bus
from ..pipeline.publish import Publisher
from ..pipeline.recall import Given, given_before
from ..pipeline.terminals import Terminals
from ..schemas import subjects
from ..schemas.errors import HandoffRefused
from ..schemas.replies import CancelRequest, TokenChunk
from ..schemas.requests import InferenceRequest

log = logging.getLogger(__name__)

REMEMBERED_LEGS = 10_000

Step = Literal["whole", "decode"]


class Continuing:
    """One for each worker. It also knows what was begun here: a message that comes again must not be begun a second time."""

    def __init__(self, bus: Bus, publisher: Publisher, terminals: Terminals) -> None:
        self._bus = bus
        self._publisher = publisher
        self._terminals = terminals
        self._begun: OrderedDict[tuple[str, int, Step], bool] = OrderedDict()

    def is_done(self, request: InferenceRequest, step: Step = "whole") -> bool:
        """Whether this leg was done here already, and only its acknowledgement was lost."""
        return self._begun.get(_key(request, step), False)

    def begin(self, request: InferenceRequest, step: Step = "whole") -> None:
        """From here on the leg may give tokens. Raises HandoffRefused when it was begun here before: the next attempt continues."""
        key = _key(request, step)
        if key in self._begun:
            raise HandoffRefused("this was begun here before, and came again")
        self._begun[key] = False
        if len(self._begun) > REMEMBERED_LEGS:
            self._begun.popitem(last=False)

    def done(self, request: InferenceRequest, step: Step = "whole") -> None:
        key = _key(request, step)
        if key in self._begun:
            self._begun[key] = True

    async def given(self, request: InferenceRequest) -> Given:
        """What earlier attempts gave. They are fenced on return: nothing more of them is taken by readers, and they cannot end it.

        Raises RequestSuperseded when the request has ended or a later attempt goes on, and BusError.
        """
        if request.attempt == 1:
            return Given()
        from_attempt = await self._terminals.fence(request)
        notice = CancelRequest(request_id=request.request_id, below_attempt=request.attempt, reason="a later attempt goes on")
        await self._publisher.send(subjects.cancel(request.request_id), notice)
        await self._send(request, Given())
        given = await given_before(self._bus, request, from_attempt)
        if given.tokens:
            log.info(
                "%s, attempt %d: goes on after %d tokens", request.request_id, request.attempt, len(given.tokens) // 4, extra=about(request)
            )
            await self._send(request, given)
            await checkpoint(self._publisher, request, given.tokens)
        return given

    async def _send(self, request: InferenceRequest, given: Given) -> None:
        """Without tokens: the fence."""
        chunk = TokenChunk(
            request_id=request.request_id, attempt=request.attempt, offset=0, tokens=given.tokens, logprobs=list(given.logprobs)
        )
        await self._publisher.send(subjects.reply(request.gateway, request.request_id), chunk)


def _key(request: InferenceRequest, step: Step) -> tuple[str, int, Step]:
    return request.request_id, request.attempt, step
