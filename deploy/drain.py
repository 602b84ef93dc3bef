"""`jetwake drain`: tells one worker or router to drain, and waits for its last word."""

import asyncio
import json

from ..pipeline.connection import Bus, RawMessage
from ..pipeline.settings import BrokerSettings
from ..schemas import subjects
from ..schemas.codec import decode, encode
from ..schemas.drain import Drained, DrainHeard, DrainOrder
from ..schemas.errors import InvalidRequest, NoWorker, StreamMissing


async def drain(broker: BrokerSettings, name: str, reason: str, wait_s: float) -> tuple[DrainHeard, Drained | None]:
    """`wait_s` 0: only until the order was heard. Raises NoWorker: nobody of this name is there, or it did not end in time."""
    last_word: asyncio.Future[Drained] = asyncio.get_running_loop().create_future()

    def on_drained(message: RawMessage) -> None:
        if not last_word.done():
            last_word.set_result(decode(message.data, Drained))

    if not name or not all(letter.isalnum() or letter in "-_" for letter in name):
        raise InvalidRequest(f"{name!r} is no name of a worker or router: `jetwake status` shows the workers")
    async with Bus.connect(broker, name="drain") as bus:
        await bus.subscribe(subjects.drained(name), on_drained)
        await bus.flush()
        try:
            answer = await bus.request(subjects.drain(name), encode(DrainOrder(reason=reason)))
        except StreamMissing:
            raise NoWorker(f"no worker or router called {name!r} is there: `jetwake status` shows the workers") from None
        heard = decode(answer.data, DrainHeard)
        if not wait_s:
            return heard, None
        try:
            async with asyncio.timeout(wait_s):
                return heard, await last_word
        except TimeoutError:
            raise NoWorker(f"{name} has heard the order and did not say within {wait_s:g} s that it has drained") from None


def print_drain(heard: DrainHeard, drained: Drained | None, as_json: bool) -> None:
    if as_json:
        facts = heard.model_dump(exclude={"type"}) | {"drained": drained is not None}
        if drained is not None:
            facts |= drained.model_dump(include={"in_time", "moved_requests", "took_s"})
        print(json.dumps(facts))
    elif drained is None:
        print(f"{heard.role} {heard.name} drains")
    else:
        how = "everything in hand ended" if drained.in_time else "the grace was over"
        print(f"{heard.role} {heard.name} drained in {drained.took_s:.1f} s: {how}, {drained.moved_requests} requests moved to others")
