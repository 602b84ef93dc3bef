"""The dead letters as an operator sees them: listed, looked at, sent again, thrown away.

Reads and removes messages of `JW_DEAD`; writes requests to `jw.requests.<model>.<class>`. A letter is named by its sequence in the
stream. Promises: a letter goes only when its request is stored again; sending the same letter twice is one request.
"""

import re
from dataclasses import dataclass

from ..schemas import subjects
from ..schemas.codec import decode
from ..schemas.decode import KvHandoff
from ..schemas.errors import InvalidRequest, Undecodable
from ..schemas.prefill import PrefillJob
from ..schemas.replies import DeadLetter
from ..schemas.requests import InferenceRequest
from ..schemas.streams import DEAD
from ..schemas.timeline import Timeline
from .connection import Bus
from .jetstream import SEQUENCE_HEADER, stored_message, stored_messages
from .publish import Publisher
from .raw import RawMessage
from .submit import store_request
from .topology import delete_message

ALL_DEAD = subjects.dead(">")
DEFAULT_TIMEOUT_S = 600.0
_RETRIED = re.compile(r"-r[0-9]+\Z")


@dataclass(frozen=True)
class Kept:
    """One letter. `request` is None when what could not be processed was no request."""

    number: int
    letter: DeadLetter
    request: InferenceRequest | None


async def dead_letters(bus: Bus) -> list[Kept]:
    """Oldest first. Raises BusError."""
    return [_kept(message) for message in await stored_messages(bus, DEAD.name, ALL_DEAD)]


async def dead_letter(bus: Bus, number: int) -> Kept:
    """Raises InvalidRequest when there is none with this number."""
    message = await stored_message(bus, DEAD.name, number) if number > 0 else None
    if message is None:
        raise InvalidRequest(f"there is no dead letter {number}: `jetwake dead list` shows those there are")
    return _kept(message)


async def send_again(bus: Bus, publisher: Publisher, kept: Kept, now_ns: int, gateway: str = "") -> InferenceRequest:
    """As a new request, with a new id and the same time to its deadline as it once had. Raises InvalidRequest when it holds none.

    `gateway`: who shall get the replies; empty: the name that waited for them the first time.
    """
    request = again_from(kept, now_ns, gateway)
    await store_request(publisher, request)
    await throw_away(bus, kept.number)
    return request


async def throw_away(bus: Bus, number: int) -> None:
    await delete_message(bus, DEAD.name, number)


def again_from(kept: Kept, now_ns: int, gateway: str = "") -> InferenceRequest:
    """The old id has its terminal already, so the new one is made of it and the letter's number. Pure."""
    old = kept.request
    if old is None:
        raise InvalidRequest(f"dead letter {kept.number} holds no request that could be sent again: {kept.letter.code}: {kept.letter.text}")
    given_ns = old.deadline_ns - old.submitted_ns if old.deadline_ns and old.submitted_ns else int(DEFAULT_TIMEOUT_S * 1e9)
    return old.model_copy(
        update={
            "request_id": f"{_RETRIED.sub('', old.request_id)[:80]}-r{kept.number}",
            "gateway": gateway or old.gateway,
            "attempt": 1,
            "failures": 0,
            "failed_workers": [],
            "submitted_ns": now_ns,
            "times": Timeline(),
            "trace": "",
            "trace_state": "",
            "deadline_ns": now_ns + given_ns,
        }
    )


def _kept(message: RawMessage) -> Kept:
    letter = decode(message.data, DeadLetter)
    return Kept(int(message.headers[SEQUENCE_HEADER]), letter, _request_in(letter))


def _request_in(letter: DeadLetter) -> InferenceRequest | None:
    for kind in (InferenceRequest, PrefillJob, KvHandoff):
        try:
            found = decode(letter.payload, kind)
        except Undecodable:
            continue
        return found if isinstance(found, InferenceRequest) else found.request
    return None
