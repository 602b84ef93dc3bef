"""Puts a request on the queue, and orders to end one: the only place that knows how.

Writes `jw.requests.<model>.<class>`, `jw.requests.again.<class>` and `jw.cancel.<request>`. The message ids make a second try at the same one the same message.
"""

from ..schemas import subjects
from ..schemas.errors import Overloaded, StreamFull
from ..schemas.headers import request_headers
from ..schemas.replies import CancelRequest
from ..schemas.requests import InferenceRequest
from .publish import Publisher


async def store_request(publisher: Publisher, request: InferenceRequest) -> None:
    """On return it is accepted. Raises Overloaded when the queue is full, PayloadTooLarge, and BusErrors."""
    await _store(publisher, request, subjects.requests(request.model, request.priority_class))


async def store_again(publisher: Publisher, request: InferenceRequest) -> None:
    """As `store_request`, for a later attempt by whoever held the one before: a worker may do this, and send no new requests."""
    await _store(publisher, request, subjects.requests_again(request.priority_class))


async def _store(publisher: Publisher, request: InferenceRequest, subject: str) -> None:
    try:
        await publisher.store(
            subject,
            request,
            message_id=subjects.message_id(request.request_id, "request", request.attempt),
            headers=request_headers(request),
        )
    except StreamFull as error:
        raise Overloaded(f"the request queue is full: {error}") from error


async def cancel_request(publisher: Publisher, request_id: str, reason: str = "") -> None:
    """Whoever holds the request ends it; one that has ended already stays as it ended. Raises BusErrors."""
    notice = CancelRequest(request_id=request_id, reason=reason)
    await publisher.store(subjects.cancel(request_id), notice, message_id=subjects.message_id(request_id, "cancel", 1))


async def cancel_earlier(publisher: Publisher, request: InferenceRequest, reason: str) -> None:
    """Whoever holds an earlier attempt of `request` ends that without a word: this one goes on. Raises BusErrors."""
    notice = CancelRequest(request_id=request.request_id, below_attempt=request.attempt, reason=reason)
    message_id = subjects.message_id(request.request_id, "replace", request.attempt - 1)
    await publisher.store(subjects.cancel(request.request_id), notice, message_id=message_id)
