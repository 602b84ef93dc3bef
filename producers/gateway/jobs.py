"""Durable jobs: OpenAI requests that were published to a stream, and are served whenever a gateway and workers are there.

Reads the stream `JW_OPENAI_JOBS`; writes the result to `jw.openai.results.<job>`, where it is kept for a day, and to the subject that
the job names. Promises: every job has exactly one result, and an error is one; a job whose gateway died is taken up by another one
where it was, by the same internal request, and not run a second time; one that outlives `MAX_DELIVERIES` of its gateways is given
up, with an error for a result and a dead letter.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from ...pipeline.catalogue import ModelCatalogue
from ...pipeline.clock import ServerClock, timestamp_ns
from ...pipeline.connection import Bus
from ...pipeline.consume import Consumer, Delivery
from ...pipeline.jetstream import SUBJECT_HEADER, TIME_HEADER, last_message, newest_message
from ...pipeline.publish import Publisher
from ...pipeline.replies import ReplyInbox
from ...pipeline.terminals import Terminals
from ...pipeline.topology_keeper import declaring
from ...schemas import subjects
from ...schemas.errors import BusError, DeadlineExceeded, InvalidRequest, JetwakeError, NotPermitted, PayloadTooLarge, RequestFailed
from ...schemas.replies import DeadLetter
from ...schemas.streams import CANCEL, JOBS_CONSUMER, OPENAI_RESULTS, ConsumerSpec, jobs_consumer_of
from .exchange import Exchange
from .exchange import Job as ExchangeJob
from .failures import Failure, failure_of, shape_of
from .front import App
from .in_process import Head, StreamEvent, call
from .job import Job, Result, job_of
from .job_requests import KNOWN_FOR_S, JobRequests, Sending
from .nats_door import http_headers, is_served, model_in, reply_headers

logger = logging.getLogger(__name__)

MAX_DELIVERIES = 6
"""A gateway that is told to stop hands its jobs back, which counts; six that end one after the other are no coincidence."""
RETRY_S = 1.0
STAGE = "openai-jobs"
_TRY_AGAIN = frozenset({"429", "503"})


class JobTaken(JetwakeError):
    """Too many gateways ended while they held it."""

    code = "job_given_up"
    retryable = True


@dataclass(frozen=True)
class JobSettings:
    """`slots`: jobs in work at the same time. `timeout_s`: for jobs that name none. `known_for_s`: see `JobRequests`."""

    name: str
    slots: int
    timeout_s: float
    known_for_s: float = KNOWN_FOR_S


class Jobs:
    """`names`: those of the models served here; `app`: the gateway's own application."""

    def __init__(
        self, bus: Bus, publisher: Publisher, clock: ServerClock, inbox: ReplyInbox, app: App, names: Sequence[str], settings: JobSettings
    ) -> None:
        self._bus = bus
        self._publisher = publisher
        self._clock = clock
        self._app = app
        self._names = frozenset(names)
        self._settings = settings
        self._catalogue = ModelCatalogue(bus, publisher)
        self._terminals = Terminals(bus, publisher, clock)
        self._requests = JobRequests(bus, publisher, clock, inbox, settings.known_for_s)
        self._running = 0
        self._gone: dict[int, asyncio.Event] = {}
        specs = [JOBS_CONSUMER, *(jobs_consumer_of(subjects.model_token(name)) for name in sorted(self._names))]
        self._consumers = [self._consumer(spec) for spec in specs]

    async def start(self) -> None:
        await self._bus.subscribe(subjects.CANCELS, lambda message: self._on_cancel(message.subject))

    async def run(self) -> None:
        """Until `stop`."""
        async with asyncio.TaskGroup() as tasks:
            for consumer in self._consumers:
                tasks.create_task(consumer.run())

    async def stop(self, grace_s: float) -> None:
        """What is not done by then goes on without this gateway, and another one reports it."""
        async with asyncio.TaskGroup() as tasks:
            for consumer in self._consumers:
                tasks.create_task(consumer.stop(grace_s))

    def _consumer(self, spec: ConsumerSpec) -> Consumer[bytes]:
        return Consumer(
            self._bus,
            self._publisher,
            spec,
            bytes,
            self._handle,
            lambda: self._settings.slots - self._running,
            self._fail,
            stage=STAGE,
            worker=self._settings.name,
            max_deliveries=MAX_DELIVERIES,
            clock=self._clock,
            declare=declaring(self._bus, spec),
        )

    # ---------------------------------------------------------------------------------------------------------- one job

    async def _handle(self, delivery: Delivery[bytes]) -> None:
        self._running += 1
        try:
            job = job_of(delivery, self._settings.timeout_s)
            if await self._pass_on(job):
                return
            kept = await self._kept(job)
            await self._deliver(job, kept if kept is not None else await self._keep(job, await self._result(job)))
        finally:
            self._running -= 1
            for consumer in self._consumers:  # they share the slots
                consumer.room_changed()

    async def _fail(self, delivery: Delivery[bytes], error: JetwakeError) -> None:
        """The handler did not get to a result."""
        job = job_of(delivery, self._settings.timeout_s)
        if job.problem:  # perhaps nobody hears of it
            await self._terminals.dead_letter(dead_letter(delivery, job, error, self._settings.name))
        await self._deliver(job, await self._kept(job) or await self._keep(job, _failed(job, failure_of(error, 0.0))))

    async def _pass_on(self, job: Job) -> bool:
        """To the gateways of the model it is for: they may come up later, if there ever was such a model."""
        model = model_in(job.body)
        if job.passed_on or model is None or model in self._names:
            return False
        if not await is_served(self._bus, model) and await self._catalogue.get(model) is None:
            return False
        headers = {**job.headers_as_given, subjects.JOB_HEADER: f"{job.sequence}.{job.stored_ns}"}
        if job.message_id:
            headers[subjects.JOB_MESSAGE_ID_HEADER] = job.message_id
        subject = subjects.openai_job_of(model, job.endpoint.name)
        await self._publisher.store_bytes(subject, job.body, message_id=f"{job.id}:pass-on", headers=headers)
        return True

    async def _result(self, job: Job) -> Result:
        if job.problem:
            raise InvalidRequest(job.problem)
        if job.deliveries > MAX_DELIVERIES:
            raise JobTaken(f"{job.deliveries - 1} gateways ended while they worked at it")
        gone = self._gone[job.sequence] = asyncio.Event()
        try:
            if await self._was_cancelled(job):
                return _cancelled(job)
            while True:
                if self._clock.now_ns() >= job.deadline_ns:
                    return _failed(job, failure_of(DeadlineExceeded(f"{job.id}: its time was over before it was done"), 0.0))
                sending = self._requests.of(job)
                result = await self._try(job, gone, sending)
                if gone.is_set():
                    return _cancelled(job)
                if result.headers[subjects.STATUS_HEADER] not in _TRY_AGAIN or not sending.refused:
                    return result
                # It is held while it waits: so this gateway takes no more than it can serve, and no delivery is used up.
                await _wait(gone, min(float(result.headers.get("Retry-After", RETRY_S)), (job.deadline_ns - self._clock.now_ns()) / 1e9))
        finally:
            del self._gone[job.sequence]

    async def _try(self, job: Job, gone: asyncio.Event, sending: Sending) -> Result:
        exchange = Exchange(request_id=job.id, metadata=dict(job.metadata))
        exchange.job = ExchangeJob(subjects.JOBS, job.deadline_ns, sending.submit)
        made: list[Result] = []

        async def document(head: Head, body: bytes) -> None:
            made.append(Result(body, reply_headers(head)))

        async def event(head: Head, event: StreamEvent) -> None:
            raise RequestFailed("the application streams what was not asked for as a stream", "internal")

        await call(self._app, job.endpoint, http_headers(job.headers), job.body, exchange, gone, document, event)
        if gone.is_set():
            await self._requests.cancel(job, exchange.submitted)
        return made[0] if made else _failed(job, Failure(500, "internal", "the application gave no answer"))

    # ----------------------------------------------------------------------------------------------------------- results

    async def _kept(self, job: Job) -> Result | None:
        message = await newest_message(self._bus, OPENAI_RESULTS.name, subjects.openai_result(job.id))
        if message is None:
            return None
        own = {name: value for name, value in message.headers.items() if not name.startswith("Nats-")}
        return Result(message.data, own)

    async def _keep(self, job: Job, result: Result) -> Result:
        """From here on this is the result. Where another one was first, that is."""
        told = {subjects.REQUEST_HEADER: job.id, subjects.JOB_SEQUENCE_HEADER: str(job.sequence)}
        if "x-request-id" in job.headers:
            told["X-Request-Id"] = job.headers["x-request-id"]
        if job.message_id:
            told[subjects.JOB_MESSAGE_ID_HEADER] = job.message_id
        named = Result(result.body, {**result.headers, **told})
        try:
            first = await self._requests.keep(job, named)
        except PayloadTooLarge as error:
            return await self._keep(job, _failed(job, failure_of(error, 0.0)))
        return named if first else await self._kept(job) or named

    async def _deliver(self, job: Job, result: Result) -> None:
        """A crash between keeping and this is made good by the next delivery; its id is the same, so a stream takes it once."""
        if not job.result_subject:
            return
        message_id = f"{job.id}:result"
        if job.result_subject.startswith(subjects.RESULTS_OUT):
            await self._publisher.store_bytes(job.result_subject, result.body, message_id=message_id, headers=result.headers)
        else:
            headers = {**result.headers, subjects.MESSAGE_ID_HEADER: message_id}
            try:
                await self._bus.publish_permitted(job.result_subject, result.body, headers)
            except NotPermitted as error:  # for the operator to mend; the copy that is kept has it
                logger.error("the result of %s is kept and was not sent to the subject that its job names: %s", job.id, error)

    # ------------------------------------------------------------------------------------------------------------ cancels

    async def _was_cancelled(self, job: Job) -> bool:
        try:
            message = await last_message(self._bus, CANCEL.name, subjects.cancel(subjects.job_name(job.sequence)))
        except BusError as error:
            logger.warning("cannot look whether %s was cancelled: %s", job.id, error)
            return False
        return message is not None and timestamp_ns(message.headers[TIME_HEADER]) > job.stored_ns and SUBJECT_HEADER in message.headers

    def _on_cancel(self, subject: str) -> None:
        name = subjects.last_token(subject).removeprefix("job-")
        if name.isdigit() and int(name) in self._gone:
            self._gone[int(name)].set()


def dead_letter(delivery: Delivery[bytes], job: Job, error: JetwakeError, worker: str) -> DeadLetter:
    return DeadLetter(
        stage=STAGE,
        subject=delivery.subject,
        code=error.code,
        text=str(error),
        payload=delivery.message,
        request_id=job.id,
        deliveries=delivery.deliveries,
        worker=worker,
    )


async def _wait(gone: asyncio.Event, wait_s: float) -> None:
    try:
        async with asyncio.timeout(max(0.0, wait_s)):
            await gone.wait()
    except TimeoutError:
        return


def _failed(job: Job, failure: Failure) -> Result:
    headers = {subjects.STATUS_HEADER: str(failure.status), subjects.CONTENT_TYPE_HEADER: "application/json"}
    return Result(failure.body(shape_of(job.endpoint.path)), headers)


def _cancelled(job: Job) -> Result:
    return _failed(job, Failure(409, "cancelled", f"{job.id} was cancelled"))
