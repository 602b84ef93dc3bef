"""Every subject, durable name, bucket key and header, spelled once. Names from outside pass `model_token` or `SafeToken` first."""

import hashlib
import re

_UNSAFE = re.compile(r"[^A-Za-z0-9_-]")
_PLAIN = re.compile(r"(?!.*-[0-9a-f]{8}\Z)[A-Za-z0-9_-]{1,80}\Z")
"""Names that are their own token. Those that end like a digest are not, or they could meet the token of another name."""

REQUEST_ID_HEADER = "Jw-Request"
"""`<model token>.<gateway>.<request id>`: whom to tell when a message cannot even be decoded."""
TRACE_HEADER = "traceparent"
MESSAGE_ID_HEADER = "Nats-Msg-Id"
EXPECTED_LAST_SUBJECT_SEQUENCE_HEADER = "Nats-Expected-Last-Subject-Sequence"


def model_token(model: str) -> str:
    """A model name as one subject token: itself when safe, else made safe and followed by a digest so that no two names meet."""
    if _PLAIN.match(model):
        return model
    digest = hashlib.sha256(model.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{_UNSAFE.sub('_', model)[:64]}-{digest}"


def requests(model: str, priority_class: str) -> str:
    return f"jw.requests.{model_token(model)}.{priority_class}"


def requests_of_class(priority_class: str) -> str:
    return f"jw.requests.*.{priority_class}"


def prefill(lane: str) -> str:
    """`lane` is `<worker>-<incarnation>`."""
    return f"jw.prefill.{lane}"


def handoff(pool: str) -> str:
    return f"jw.handoff.{pool}"


def reply(gateway: str, request_id: str) -> str:
    return f"jw.replies.{gateway}.{request_id}"


def replies_of(gateway: str) -> str:
    return f"jw.replies.{gateway}.>"


def result(model: str, gateway: str, request_id: str) -> str:
    return f"jw.results.{model_token(model)}.{gateway}.{request_id}"


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


def release(lane: str) -> str:
    return f"jw.release.{lane}"


def message_id(request_id: str, stage: str, attempt: int) -> str:
    """The id that makes one publish of one stage of one attempt idempotent."""
    return f"{request_id}:{stage}:{attempt}"


def reply_target(model: str, gateway: str, request_id: str) -> str:
    """The value of REQUEST_ID_HEADER."""
    return f"{model_token(model)}.{gateway}.{request_id}"


def last_token(subject: str) -> str:
    return subject.rsplit(".", 1)[-1]
