"""Answers `jw.explain`: why a request went to a worker, or where one would go now. Every router is asked; who knows, answers.

Answers `jw.routers` too: that this router is there, and what it has in hand.
"""

import asyncio
import logging
from contextlib import suppress

from ..pipeline.connection import Bus, RawMessage
from ..schemas import subjects
from ..schemas.codec import decode, encode
from ..schemas.errors import BrokerUnavailable, JetwakeError, Undecodable
from ..schemas.routing import Explain, Explanation
from .router import Router

log = logging.getLogger(__name__)


class Explainer:
    def __init__(self, bus: Bus, router: Router, name: str, policy_name: str) -> None:
        self._bus = bus
        self._router = router
        self._name = name
        self._policy_name = policy_name
        self._asked: asyncio.Queue[tuple[Explain | None, str]] = asyncio.Queue(maxsize=100)

    async def listen(self) -> None:
        await self._bus.subscribe(subjects.EXPLAIN, self._on_asked)
        await self._bus.subscribe(subjects.ROUTERS, lambda message: self._ask(None, message.reply))

    async def run(self) -> None:
        while True:
            question, reply = await self._asked.get()
            answer = self._router.here() if question is None else await self._answer(question)
            if answer is not None:
                with suppress(BrokerUnavailable):  # nobody waits for it that long
                    await self._bus.publish(reply, encode(answer))

    async def _answer(self, question: Explain) -> Explanation | None:
        if question.request is None:
            return self._router.explain_decided(question.request_id)
        try:
            return await self._router.explain(question.request)
        except JetwakeError as error:
            return Explanation(router=self._name, policy=self._policy_name, reason=f"{error.code}: {error}")

    def _on_asked(self, message: RawMessage) -> None:
        try:
            question = decode(message.data, Explain)
        except Undecodable as error:
            log.warning("a question that cannot be read: %s", error)
            return
        self._ask(question, message.reply)

    def _ask(self, question: Explain | None, reply: str) -> None:
        if reply and not self._asked.full():
            self._asked.put_nowait((question, reply))
