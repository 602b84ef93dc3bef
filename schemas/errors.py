"""The one error tree. Every error has a stable `code` for machines and says whether trying again can help (`retryable`).

JetwakeError
├── RequestRefused            the caller must change the request
│   ├── InvalidRequest        a field is wrong; the text names it and the limit
│   ├── UnknownModel          no worker ever announced this model
│   ├── UnknownRequest        nothing is kept of a request with this id
│   ├── NotResumable          a stream that cannot be gone on with exactly
│   ├── PromptTooLong         prompt plus max_tokens is over the model's context
│   └── PayloadTooLarge       encoded message is over what the broker carries
├── Overloaded                a bounded queue is full; carries `retry_after_s`
│   └── QuotaExceeded         the tenant has used up what it may have in a minute
├── Undecodable               bytes that are no message of the expected kind
├── RequestEnded              what a waiting caller gets instead of tokens
│   ├── RequestFailed         ended with a failed reply; carries the reply's code
│   ├── RequestCancelled      ended because somebody cancelled it
│   ├── RequestSuperseded     a later attempt of it goes on elsewhere: this one ends without a word
│   └── DeadlineExceeded      its deadline passed before it was done
├── BusError                  the broker or the way to it
│   ├── BrokerUnavailable     no connection, or no answer in time (the outcome is unknown: send again, same id)
│   ├── StreamMissing         the stream or consumer is not there (yet, or any more)
│   ├── StreamExists          the name of a stream is taken by one that is declared otherwise
│   ├── StreamFull            the stream refuses new messages
│   ├── SequenceConflict      a compare-and-set lost: somebody else wrote first
│   ├── NotPermitted          the broker's permissions forbid it
│   └── BusRejected           any other refusal; the broker's own words are in the text
├── WorkerError
│   ├── NoWorker              nobody alive can take it now
│   ├── EngineDead            the engine will not come back in this process
│   ├── EngineRefused         the engine says the request is wrong
│   ├── HandoffRefused        a handoff that must not reach the engine (incompatible, malformed, delivered before)
│   │   └── HandoffStale      its blocks are not kept any more, or others have them: nobody's fault, prefill afresh
│   ├── NoRoom                waited too long for KV blocks on this worker: another one takes it
│   ├── WorkerLeaving         the worker drains and cannot end this in time: another one takes it
│   ├── DeclaredDead          this worker was taken for dead and its queue given to others: it starts anew
│   ├── PullFailed            the KV cache could not be pulled: prefill afresh
│   └── AnswerDiverged        a later attempt did not repeat the tokens that were already given
└── SetupError                an option, a file or an installation is wrong; the text says what to do
"""

from typing import ClassVar


class JetwakeError(Exception):
    """Root of the tree. `code` never changes once released; the text may."""

    code: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False


class RequestRefused(JetwakeError):
    code = "refused"


class InvalidRequest(RequestRefused):
    code = "invalid_request"


class UnknownModel(RequestRefused):
    code = "unknown_model"


class UnknownRequest(RequestRefused):
    code = "unknown_request"


class NotResumable(RequestRefused):
    code = "not_resumable"


class PromptTooLong(RequestRefused):
    code = "prompt_too_long"


class PayloadTooLarge(RequestRefused):
    code = "payload_too_large"


class Overloaded(JetwakeError):
    code = "overloaded"
    retryable = True

    def __init__(self, text: str, retry_after_s: float = 1.0) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


class QuotaExceeded(Overloaded):
    code = "rate_limit_exceeded"


class Undecodable(JetwakeError):
    code = "undecodable"


class RequestEnded(JetwakeError):
    code = "ended"


class RequestFailed(RequestEnded):
    code = "failed"

    def __init__(self, text: str, reply_code: str) -> None:
        super().__init__(text)
        self.reply_code = reply_code


class RequestCancelled(RequestEnded):
    code = "cancelled"


class RequestSuperseded(RequestEnded):
    code = "superseded"


class DeadlineExceeded(RequestEnded):
    code = "deadline_exceeded"


class BusError(JetwakeError):
    code = "bus"


class BrokerUnavailable(BusError):
    code = "broker_unavailable"
    retryable = True


class StreamMissing(BusError):
    code = "stream_missing"
    retryable = True


class StreamFull(BusError):
    code = "stream_full"
    retryable = True


class SequenceConflict(BusError):
    code = "sequence_conflict"


class NotPermitted(BusError):
    code = "not_permitted"


class BusRejected(BusError):
    code = "bus_rejected"


class StreamExists(BusError):
    """In a cluster it may still be in the making."""

    code = "stream_exists"


class WorkerError(JetwakeError):
    code = "worker"


class NoWorker(WorkerError):
    code = "no_worker"
    retryable = True


class EngineDead(WorkerError):
    code = "engine_dead"
    retryable = True


class EngineRefused(WorkerError):
    code = "engine_refused"


class HandoffRefused(WorkerError):
    code = "handoff_refused"
    retryable = True


class HandoffStale(HandoffRefused):
    code = "handoff_stale"


class NoRoom(WorkerError):
    code = "no_room"
    retryable = True


class WorkerLeaving(WorkerError):
    code = "worker_leaving"
    retryable = True


class DeclaredDead(WorkerError):
    code = "declared_dead"
    retryable = True


class PullFailed(WorkerError):
    code = "pull_failed"
    retryable = True


class AnswerDiverged(WorkerError):
    code = "answer_diverged"


class SetupError(JetwakeError):
    code = "setup"
