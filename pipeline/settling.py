"""Messages in hand, and what is said to the broker about them.

Writes acknowledgements, dead letters, and the failed terminal of a request that cannot even be decoded. Promises: a settlement
is confirmed by the broker or known to be void; nothing is taken off a queue before what must be told about it is stored.
"""

import asyncio
import logging
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from ..schemas.errors import BrokerUnavailable, BusError, JetwakeError, StreamMissing, Undecodable
from ..schemas.replies import DeadLetter, Failed
from ..schemas.streams import ConsumerSpec
from ..schemas.subjects import REQUEST_ID_HEADER
from .connection import Bus
from .jetstream import DeliveryFacts, api, nak
from .raw import RawMessage
from .terminals import ReplyTarget, Terminals

logger = logging.getLogger(__name__)

_AGAIN_S = 0.1
_REPLY_TARGET = re.compile(r"([A-Za-z0-9_-]{1,96})\.([A-Za-z0-9_-]{1,96})\.([A-Za-z0-9_-]{1,96})")


@dataclass(eq=False)
class Held:
    """A fetched message until it is settled. A second delivery of it while it is held only renews `raw` and `facts`."""

    raw: RawMessage
    facts: DeliveryFacts
    begun: bool = False
    decoded: bool = False

    @property
    def identity(self) -> tuple[int, int]:
        return self.facts.sequence, self.facts.stored_ns  # after a power cut, a broker may give a sequence again


class Settler:
    """For one consumer. `worker` and `stage` are named in its dead letters."""

    def __init__(self, bus: Bus, terminals: Terminals, spec: ConsumerSpec, stage: str, worker: str) -> None:
        self._bus = bus
        self._terminals = terminals
        self._spec = spec
        self._stage = stage
        self._worker = worker

    async def confirm(self, held: Held, word: bytes) -> None:
        """The broker's word that it took our settlement: the only way to learn that the consumer was taken from us."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._bus.settings.publish_deadline_s
        # In a cluster, a consumer that has no leader at this moment looks the same as one that is gone.
        surely_gone = clock() + (self._bus.missing_grace_s if self._bus.is_clustered else 0.0)
        while True:
            try:
                await self._bus.request(held.raw.reply, word)
                return
            except StreamMissing:
                if clock() >= surely_gone:
                    logger.warning("%s: the consumer is gone; message %d now belongs to others", self._spec.durable, held.facts.sequence)
                    return
            except BrokerUnavailable as error:
                if clock() >= deadline or await self._never_gave(held):
                    logger.warning("%s: message %d is done but may come again: %s", self._spec.durable, held.facts.sequence, error)
                    return
            except asyncio.CancelledError:
                with suppress(BusError):  # no time to hear the answer; it is done all the same
                    await self._bus.publish(held.raw.reply, word)
                raise
            await asyncio.sleep(_AGAIN_S)

    async def _never_gave(self, held: Held) -> bool:
        """Whether the consumer was made anew and has not come to this message: then the broker leaves our settlement unanswered."""
        try:
            facts = await api(self._bus, f"CONSUMER.INFO.{held.facts.stream}.{held.facts.durable}")
        except BusError:
            return False  # it is down, and the question stays open
        return int(facts["delivered"]["stream_seq"]) < held.facts.sequence

    async def hand_back(self, held: Held, delay_s: float) -> None:
        with suppress(BusError):  # down: then it comes back after its ack wait
            await self._bus.publish(held.raw.reply, nak(delay_s))

    async def bury(self, held: Held, error: Exception) -> None:
        """A copy for an operator, with the reason."""
        target = reply_target(held.raw.headers)
        letter = DeadLetter(
            stage=self._stage, subject=held.raw.subject, payload=held.raw.data, deliveries=held.facts.deliveries, worker=self._worker,
            code=error.code if isinstance(error, JetwakeError) else JetwakeError.code, text=str(error) or repr(error),
            request_id=target.request_id if target else "",
        )  # fmt: skip
        await self._terminals.dead_letter(letter)

    async def tell_undecodable(self, held: Held, error: Undecodable) -> None:
        """Whoever the headers name hears that the request has failed."""
        target = reply_target(held.raw.headers)
        if target is not None:
            failed = Failed(request_id=target.request_id, attempt=1, code=error.code, text=str(error))
            await self._terminals.end(target, failed)


def reply_target(headers: Mapping[str, str]) -> ReplyTarget | None:
    """Whom the headers name as waiting for the reply, if they do."""
    match = _REPLY_TARGET.fullmatch(headers.get(REQUEST_ID_HEADER, ""))
    return ReplyTarget(*match.groups()) if match else None
