"""Every subject, durable name, bucket key and header, spelled once. Names from outside pass `model_token` or `SafeToken` first."""

import hashlib
import re

_UNSAFE = re.compile(r"[^A-Za-z0-9_-]")
_PLAIN = re.compile(r"(?!.*-[0-9a-f]{8}\Z)(?!again\Z)[A-Za-z0-9_-]{1,80}\Z")
"""Names that are their own token. Those that end like a digest are not, or they could meet the token of another name; nor is `again`."""

_RESULT_TOKEN = re.compile(r"[A-Za-z0-9_=-]+")

REQUEST_ID_HEADER = "Jw-Request"
"""`<model token>.<gateway>.<request id>`: whom to tell when a message cannot even be decoded."""
MESSAGE_ID_HEADER = "Nats-Msg-Id"
TRACEPARENT_HEADER = "traceparent"
TRACESTATE_HEADER = "tracestate"
EXPECTED_LAST_SUBJECT_SEQUENCE_HEADER = "Nats-Expected-Last-Subject-Sequence"


def model_token(model: str) -> str:
    """A model name as one subject token: itself when safe, else made safe and followed by a digest so that no two names meet."""
    if _PLAIN.match(model):
        return model
    digest = hashlib.sha256(model.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{_UNSAFE.sub('_', model)[:64]}-{digest}"


def requests(model: str, priority_class: str) -> str:
    return f"jw.requests.{model_token(model)}.{priority_class}"


def requests_again(priority_class: str) -> str:
    """For whoever held a request and hands it on as its next attempt: no model has this token, and workers may publish nowhere else."""
    return f"jw.requests.again.{priority_class}"


def is_again(subject: str) -> bool:
    return subject.startswith("jw.requests.again.")


def prefill(lane: str) -> str:
    """`lane` is `<worker>-<incarnation>`."""
    return f"jw.prefill.{lane}"


NO_DOMAIN = "_"


def domain_token(domain: str) -> str:
    """A topology domain as one subject token; workers that name none are one domain together."""
    return model_token(domain) if domain else NO_DOMAIN


def handoff(pool: str, token: str) -> str:
    """`token`: the prefill worker's `domain_token`. It may be `*`."""
    return f"jw.handoff.{pool}.{token}"


def reply(gateway: str, request_id: str) -> str:
    return f"jw.replies.{gateway}.{request_id}"


def replies_of(gateway: str) -> str:
    return f"jw.replies.{gateway}.>"


def answer(gateway: str, request_id: str, attempt: int) -> str:
    return f"jw.answers.{gateway}.{request_id}.{attempt}"


def answers_in(gateway: str) -> str:
    """All that is kept for one name."""
    return f"jw.answers.{gateway}.>"


def announcements_of(gateway: str) -> str:
    """Said by whoever sent a request, and not by who answers it."""
    return f"jw.answers.{gateway}.*.0"


def claim(request_id: str, attempt: int) -> str:
    return f"jw.claims.{request_id}.{attempt}"


def answers_of(gateway: str, request_id: str) -> str:
    """`gateway` may be `*`: whoever waits for it."""
    return f"jw.answers.{gateway}.{request_id}.*"


def result(model: str, gateway: str, request_id: str) -> str:
    return f"jw.results.{model_token(model)}.{gateway}.{request_id}"


def results_of(request_id: str, gateway: str = "*") -> str:
    """`gateway` `*`: whoever waits for it. `request_id` may be `*`."""
    return f"jw.results.*.{gateway}.{request_id}"


def cancel(request_id: str) -> str:
    return f"jw.cancel.{request_id}"


CANCELS = "jw.cancel.>"


def dead(stage: str) -> str:
    return f"jw.dead.{stage}"


def load(worker: str) -> str:
    return f"jw.load.{worker}"


LOADS = "jw.load.*"


def kv(worker: str) -> str:
    return f"jw.kv.{worker}"


KV_EVENTS = "jw.kv.*"


def snapshot(lane: str) -> str:
    return f"jw.snapshot.{lane}"


def routed(router: str) -> str:
    return f"jw.routed.{router}"


ROUTED = "jw.routed.*"
EXPLAIN = "jw.explain"
ROUTERS = "jw.routers"
"""Asked: who routes. Every router answers."""


def presence(gateway: str) -> str:
    """Answered by whoever reads the replies of this name: nobody there, nobody reads."""
    return f"jw.present.{gateway}"


def drain(name: str) -> str:
    """Asks the worker or router of this name to drain and end."""
    return f"jw.drain.{name}"


def drained(name: str) -> str:
    """How a drain ended, told by the process that drained."""
    return f"jw.drained.{name}"


def probe(worker: str) -> str:
    """Asks a worker to take its part in measuring a link."""
    return f"jw.probe.{worker}"


def release(lane: str) -> str:
    return f"jw.release.{lane}"


# ---------------------------------------------------------------------------- for applications that speak NATS: JSON, no msgpack

OPENAI_GROUP = "openai"
"""The queue group of all gateways on the subjects of `openai`."""
STATUS_HEADER = "Jw-Status"
REQUEST_HEADER = "Jw-Request-Id"
END_HEADER = "Jw-End"
EVENT_HEADER = "Jw-Event"
KEEP_ALIVE_HEADER = "Jw-Keep-Alive"
TIMEOUT_HEADER = "Jw-Timeout-S"
METADATA_HEADER = "Jw-Metadata"
RESULT_SUBJECT_HEADER = "Jw-Result-Subject"
JOB_SEQUENCE_HEADER = "Jw-Job-Sequence"
JOB_HEADER = "Jw-Job"
"""Of a job that was passed on to the gateways of another model: its id. Only gateways say it."""
JOB_MESSAGE_ID_HEADER = "Jw-Job-Message-Id"
"""With a result: the `Nats-Msg-Id` that its job had."""
CONTENT_TYPE_HEADER = "Content-Type"
JOBS = "jobs"
"""In place of a gateway's name: whoever holds the job reads the replies."""
BATCHES = "batches"
"""The same for the lines of batches: whoever runs the batch reads the replies."""
RESULTS_OUT = "jw.results-out."
"""Subjects that begin so are kept for a day; those that applications choose for results of jobs."""


def results_out(tenant: str) -> str:
    """Of one application that the broker knows by this name."""
    return f"{RESULTS_OUT}{tenant}.>"


def openai(endpoint: str) -> str:
    """Request and reply. `endpoint` is a name of `openai_endpoints`."""
    return f"jw.openai.{endpoint}"


def openai_of(model: str, endpoint: str) -> str:
    """As `openai`, for the gateways of one model: where others pass on what they do not serve. `endpoint` may be `>`."""
    return f"jw.openai-of.{model_token(model)}.{endpoint}"


def openai_group_of(model: str) -> str:
    return f"openai-of-{model_token(model)}"


OPENAI_OF_ALL = "jw.openai-of.>"
"""What gateways pass on to each other."""
OPENAI_JOBS_OF_ALL = "jw.openai.jobs-of.>"


def openai_job(endpoint: str) -> str:
    """A prefix of its own: a stream on the subjects of `openai` would answer every request with its own acknowledgement."""
    return f"jw.openai.jobs.{endpoint}"


def openai_job_of(model: str, endpoint: str) -> str:
    """Jobs that were passed on to the gateways of one model. `endpoint` may be `>`."""
    return f"jw.openai.jobs-of.{model_token(model)}.{endpoint}"


def openai_result(job: str) -> str:
    return f"jw.openai.results.{job}"


def openai_accepted(request_id: str) -> str:
    """That this request of a job is on the queue, and will end."""
    return f"jw.openai.accepted.{request_id}"


def openai_body(gateway: str, request_id: str) -> str:
    """What a streamed response was asked with, for the gateway that goes on with it. `gateway`, where it began, may be `*`."""
    return f"jw.openai-bodies.{gateway}.{request_id}"


def openai_reader(request_id: str) -> str:
    """Who reads a streamed response now: the last one that began to."""
    return f"jw.openai-readers.{request_id}"


def event(model: str, outcome: str) -> str:
    return f"jw.events.{model_token(model)}.{outcome}"


EVENTS = "jw.events.*.*"


def job_id(sequence: int, stored_ns: int) -> str:
    """The same for every delivery of a job, and for no other job: a stream that was made anew counts from 1 again."""
    return f"job-{sequence}-{stored_ns:x}"


def job_name(sequence: int) -> str:
    """What a job can be cancelled by: the sequence is in the acknowledgement of its publish."""
    return f"job-{sequence}"


def result_subject_problem(subject: str) -> str:
    """Why a result cannot go to a subject that an application named; empty when it can."""
    tokens = subject.split(".")
    if not subject or len(subject) > 256:
        return "it must have 1 to 256 characters"
    if any(_RESULT_TOKEN.fullmatch(token) is None for token in tokens):
        return "tokens are of letters, digits, _, - and =, with single dots between: no wildcards, spaces or $"
    if tokens[0].startswith("_"):
        return "inboxes and other subjects that begin with _ are not allowed: they end with a connection, and a job does not"
    if tokens[0].lower() == "jw" and not (subject.startswith(RESULTS_OUT) and len(tokens) > 2):
        return f"of the subjects under jw. only those under {RESULTS_OUT} are for results"
    return ""


def reply_subject_problem(subject: str) -> str:
    """Why an application's question cannot be answered there; empty when it can. Whoever answers may publish where the asker may not."""
    if subject.startswith("$") or subject.lower().startswith("jw."):
        return "answers go to inboxes, and not to subjects that begin with jw. or $"
    return ""


def batches(model: str) -> str:
    return f"jw.batches.{model_token(model)}"


def batch_line(batch_id: str, line: int) -> str:
    return f"jw.batchlines.{batch_id}.{line}"


def batch_lines(batch_id: str) -> str:
    return f"jw.batchlines.{batch_id}.*"


def batch_request(batch_id: str, line: int) -> str:
    """The id of the request that a line becomes: the same whoever runs the batch."""
    return f"{batch_id}-{line}"


def message_id(request_id: str, stage: str, attempt: int) -> str:
    """The id that makes one publish of one stage of one attempt idempotent."""
    return f"{request_id}:{stage}:{attempt}"


def reply_target(model: str, gateway: str, request_id: str) -> str:
    """The value of REQUEST_ID_HEADER."""
    return f"{model_token(model)}.{gateway}.{request_id}"


def worker_of(lane: str) -> str:
    """Incarnations have no hyphen."""
    return lane.rpartition("-")[0]


def last_token(subject: str) -> str:
    return subject.rsplit(".", 1)[-1]
