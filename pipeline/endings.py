"""How a request that does not finish ends, said once for all roles: failed, cancelled, expired, or handed back for another attempt.

Writes terminals (through `pipeline.terminals`), dead letters, and requests with a higher attempt to `jw.requests.again.<class>`.
"""

import logging

from ..schemas import signals, subjects
from ..schemas.codec import encode
from ..schemas.errors import (
    DeadlineExceeded,
    HandoffStale,
    JetwakeError,
    NoRoom,
    RequestCancelled,
    RequestEnded,
    RequestSuperseded,
    WorkerLeaving,
)
from ..schemas.replies import Cancelled, DeadLetter, Expired, Failed
from ..schemas.requests import InferenceRequest
from . import instruments, tracing
from .about import about
from .publish import Publisher
from .submit import cancel_earlier, store_again
from .terminals import Terminals

log = logging.getLogger(__name__)

MAX_FAILURES = 3
"""After so many attempts that ended in a fault, the request itself is taken for the cause."""
NO_FAULTS = (WorkerLeaving, HandoffStale, NoRoom)
"""What moves a request to another worker and is not held against it."""


class Endings:
    def __init__(self, publisher: Publisher, terminals: Terminals) -> None:
        self._publisher = publisher
        self._terminals = terminals

    async def ended_early(self, request: InferenceRequest, ending: RequestEnded) -> None:
        """The reply for a request that its owner cancelled or whose deadline passed; none for an attempt that a later one replaced."""
        if isinstance(ending, RequestSuperseded):
            return
        if isinstance(ending, RequestCancelled):
            await self._terminals.end(
                request,
                Cancelled(
                    request_id=request.request_id,
                    model=request.model,
                    attempt=request.attempt,
                    prompt_length_tokens=request.prompt_length_tokens,
                ),
            )
        elif isinstance(ending, DeadlineExceeded):
            await self._terminals.end(
                request,
                Expired(
                    request_id=request.request_id,
                    model=request.model,
                    attempt=request.attempt,
                    prompt_length_tokens=request.prompt_length_tokens,
                    phase=str(ending),
                ),
            )
        else:
            await self.failed(request, ending)

    async def failed(self, request: InferenceRequest, error: JetwakeError) -> None:
        await self._terminals.end(
            request,
            Failed(
                request_id=request.request_id,
                model=request.model,
                attempt=request.attempt,
                prompt_length_tokens=request.prompt_length_tokens,
                code=error.code,
                text=str(error),
            ),
        )

    async def again(self, request: InferenceRequest, error: JetwakeError, *, is_fault: bool | None = None, worker: str = "") -> None:
        """Another attempt, routed and prefilled afresh; after the last one a failed reply and a dead letter.

        The higher attempt fences this one: whoever still holds that ends it without a word. A request that has ended (only its
        acknowledgement was lost) is left alone. `is_fault` False: it is only moved, and may be as often as it helps; None: the error
        says. `worker`: where the fault was; routers prefer others.
        """
        if await self._terminals.has_ended(request):
            return
        is_fault = not isinstance(error, NO_FAULTS) if is_fault is None else is_fault
        changes: dict[str, object] = {"failures": request.failures + is_fault}
        if is_fault and worker and worker not in request.failed_workers:
            changes["failed_workers"] = [*request.failed_workers, worker]
        tried = request.model_copy(update=changes)
        words = "%s: attempt %d comes to nothing%s: %s"
        told = (request.request_id, request.attempt, f" on {worker}" if worker else "", error)
        log.log(logging.WARNING if is_fault else logging.INFO, words, *told, extra=about(request, worker))
        now_ns = self._terminals.now_ns()
        begun_ns = request.times.again_ns or request.submitted_ns
        tracing.record(signals.ATTEMPT_SPAN, request, worker, begun_ns, now_ns, error=error)
        if tried.failures >= MAX_FAILURES:
            await self._give_up(tried, error)
            return
        following = tried.model_copy(update={"attempt": request.attempt + 1, "times": request.times.anew(now_ns)})
        await store_again(self._publisher, following)
        instruments.add(signals.REQUESTS_RETRIED, 1, error.code, "true" if is_fault else "false")
        await cancel_earlier(self._publisher, following, str(error))

    async def _give_up(self, request: InferenceRequest, error: JetwakeError) -> None:
        letter = DeadLetter(
            stage="attempts",
            subject=subjects.requests(request.model, request.priority_class),
            code=error.code,
            text=str(error),
            payload=encode(request),
            request_id=request.request_id,
            attempts=request.attempt,
            worker=request.failed_workers[-1] if request.failed_workers else "",
        )
        log.error("%s: given up after %d failures: %s", request.request_id, request.failures, error, extra=about(request, letter.worker))
        await self._terminals.dead_letter(letter)
        await self.failed(request, error)
