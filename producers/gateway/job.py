"""A durable job as it lies in the stream: what its message says, read once. Pure."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from ...pipeline.consume import Delivery
from ...schemas import subjects
from ...schemas.openai_endpoints import JOB_ENDPOINTS, Endpoint
from .exchange import metadata_in
from .nats_door import timeout_in

MAX_TIMEOUT_S = 86_400.0
"""The ends of requests are kept for a day."""
_NOT_PASSED_ON = ("nats-msg-id", "nats-expected-", "nats-rollup", "nats-ttl", "jw-job")


@dataclass(frozen=True)
class Result:
    """`headers` go with it to whoever hears it."""

    body: bytes
    headers: Mapping[str, str]


@dataclass(frozen=True)
class Job:
    """`problem`: why it cannot be done at all. `headers` has names in lower case. `result_subject` empty: only the kept copy is made."""

    id: str
    sequence: int
    stored_ns: int
    endpoint: Endpoint
    body: bytes
    headers: Mapping[str, str]
    headers_as_given: Mapping[str, str]
    result_subject: str
    deadline_ns: int
    metadata: Mapping[str, str]
    deliveries: int
    passed_on: bool
    message_id: str
    problem: str = ""


def job_of(delivery: Delivery[bytes], timeout_s: float) -> Job:
    """From a message as it was delivered. What is wrong with it is its `problem`."""
    headers = {name.lower(): value for name, value in delivery.headers.items()}
    sequence, stored_ns, passed_on = delivery.sequence, delivery.stored_ns, False
    subject = delivery.subject
    if subject.startswith(subjects.openai_job("")):
        name = subject.removeprefix(subjects.openai_job(""))
    else:
        name, passed_on = subject.split(".", 4)[4], True
        first, _, second = headers.get(subjects.JOB_HEADER.lower(), "").partition(".")
        if first.isdigit() and second.isdigit():
            sequence, stored_ns = int(first), int(second)
    endpoint = JOB_ENDPOINTS.get(name)
    result_subject = headers.get(subjects.RESULT_SUBJECT_HEADER.lower(), "")
    problem = _problem(name, endpoint, result_subject, delivery.message)
    metadata: Mapping[str, str] = {}
    try:
        metadata = metadata_in(headers.get(subjects.METADATA_HEADER.lower()))
        timeout_s = min(timeout_in(headers) or timeout_s, MAX_TIMEOUT_S)
    except ValueError as error:
        problem = problem or str(error)
    return Job(
        id=subjects.job_id(sequence, stored_ns),
        sequence=sequence,
        stored_ns=stored_ns,
        endpoint=endpoint or JOB_ENDPOINTS["chat.completions"],
        body=delivery.message,
        headers=headers,
        headers_as_given={name: value for name, value in delivery.headers.items() if not name.lower().startswith(_NOT_PASSED_ON)},
        result_subject="" if result_subject and subjects.result_subject_problem(result_subject) else result_subject,
        deadline_ns=stored_ns + int(timeout_s * 1e9),
        metadata=metadata,
        deliveries=delivery.deliveries,
        passed_on=passed_on,
        message_id=headers.get(subjects.JOB_MESSAGE_ID_HEADER.lower() if passed_on else subjects.MESSAGE_ID_HEADER.lower(), ""),
        problem=problem,
    )


def _problem(name: str, endpoint: Endpoint | None, result_subject: str, body: bytes) -> str:
    if endpoint is None:
        return f"there are no jobs for {name!r}: {', '.join(JOB_ENDPOINTS)}"
    if result_subject and (wrong := subjects.result_subject_problem(result_subject)):
        return f"{subjects.RESULT_SUBJECT_HEADER} {result_subject!r}: {wrong}"
    return "a job has one result: leave `stream` out" if _is_streamed(body) else ""


def _is_streamed(body: bytes) -> bool:
    try:
        fields: Any = json.loads(body)
    except ValueError:
        return False
    return isinstance(fields, dict) and bool(cast(dict[str, Any], fields).get("stream"))
