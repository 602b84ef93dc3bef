"""The requests of a durable job, sent so that whoever holds the job later finds them: the same ids, and replies under one name.

Writes `jw.requests.<model>.<class>`, `jw.openai.accepted.<request>` and `jw.openai.results.<job>`; reads `jw.replies.jobs.*` and what is
kept of it. Promises: a request that was accepted once is never sent again, only read on; one of which that is not known is sent as
the same message, or, when the broker would not know the message any more, as a later attempt, which fences the earlier one.
"""

from ...pipeline.clock import ServerClock
from ...pipeline.connection import Bus
from ...pipeline.jetstream import newest_message
from ...pipeline.publish import Publisher
from ...pipeline.replies import ReplyInbox, ReplyStream
from ...pipeline.submit import cancel_request, store_request
from ...schemas import subjects
from ...schemas.errors import SequenceConflict
from ...schemas.requests import InferenceRequest
from ...schemas.streams import DUPLICATE_WINDOW_S, OPENAI_RESULTS
from .job import Job, Result

KNOWN_FOR_S = DUPLICATE_WINDOW_S / 2
"""A message that is sent again within this time after it can first have been sent is surely recognised by the broker."""


class JobRequests:
    def __init__(self, bus: Bus, publisher: Publisher, clock: ServerClock, inbox: ReplyInbox, known_for_s: float = KNOWN_FOR_S) -> None:
        self._bus = bus
        self._publisher = publisher
        self._clock = clock
        self._inbox = inbox
        self._known_for_ns = int(known_for_s * 1e9)

    def of(self, job: Job) -> "Sending":
        return Sending(self, job)

    async def submit(self, job: Job, request: InferenceRequest) -> ReplyStream:
        """Raises Overloaded and BusErrors."""
        accepted = subjects.openai_accepted(request.request_id)
        known = await newest_message(self._bus, OPENAI_RESULTS.name, accepted) is not None
        if not known and job.deliveries > 1:
            known = await self._inbox.lookup(request.model, subjects.JOBS, request.request_id) is not None
        if not known:
            await store_request(self._publisher, self._attempt(job, request))
            await self._publisher.store_bytes(accepted, b"", message_id=f"{request.request_id}:accepted")
        return await self._inbox.resume(subjects.JOBS, request.request_id, request.model, request.deadline_ns)

    def _attempt(self, job: Job, request: InferenceRequest) -> InferenceRequest:
        """A gateway may have ended between sending a request and noting that."""
        if job.deliveries > 1 and self._clock.now_ns() - job.stored_ns > self._known_for_ns:
            return request.model_copy(update={"attempt": 2})
        return request

    async def cancel(self, job: Job, count: int) -> None:
        """All of its requests, of which there are `count`."""
        for number in range(count):
            request_id = job.id if number == 0 else f"{job.id}-{number}"
            await cancel_request(self._publisher, request_id, "its job was cancelled")

    async def keep(self, job: Job, result: Result) -> bool:
        """Whether this is now the result of the job: the first one is."""
        try:
            await self._publisher.store_bytes(
                subjects.openai_result(job.id), result.body, message_id=f"{job.id}:keep", headers=result.headers, first_only=True
            )
        except SequenceConflict:
            return False
        return True


class Sending:
    """One try at a job. `refused`: something of it is not on the queue, so trying again can help."""

    def __init__(self, requests: JobRequests, job: Job) -> None:
        self._requests = requests
        self._job = job
        self._wanted = 0
        self._sent = 0

    @property
    def refused(self) -> bool:
        return not self._sent or self._sent < self._wanted

    async def submit(self, request: InferenceRequest) -> ReplyStream:
        """Raises Overloaded and BusErrors."""
        self._wanted += 1
        replies = await self._requests.submit(self._job, request)
        self._sent += 1
        return replies
