"""The JetStream API by raw requests: its subjects, headers, answers and acknowledgements, spelled once.

Reads and writes `$JS.API.*` through a `Bus`. Promises: an `error` field in an answer becomes one of our errors; nothing here
waits longer than the bus's request timeout.
"""

import asyncio
import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, cast

from ..schemas.errors import BrokerUnavailable, BusRejected, JetwakeError
from .connection import Bus
from .faults import refusal
from .raw import RawMessage

Json = dict[str, Any]

TTL_HEADER = "Nats-TTL"
ROLLUP_HEADER = "Nats-Rollup"
KV_OPERATION_HEADER = "KV-Operation"
MARKER_REASON_HEADER = "Nats-Marker-Reason"
STREAM_HEADER = "Nats-Stream"
SUBJECT_HEADER = "Nats-Subject"
SEQUENCE_HEADER = "Nats-Sequence"
TIME_HEADER = "Nats-Time-Stamp"
PENDING_MESSAGES_HEADER = "Nats-Pending-Messages"

ACK = b"+ACK"
NAK = b"-NAK"
TERM = b"+TERM"
IN_PROGRESS = b"+WPI"

_NO_MESSAGE = "404"
_NO_MESSAGE_FOUND = 10037
_ASK_LEADER_AGAIN_S = 0.1


def nak(delay_s: float) -> bytes:
    return NAK if delay_s <= 0 else NAK + json.dumps({"delay": round(delay_s * 1e9)}).encode()


def api_subject(path: str) -> str:
    return f"$JS.API.{path}"


def pull_subject(stream: str, durable: str) -> str:
    return api_subject(f"CONSUMER.MSG.NEXT.{stream}.{durable}")


def ack_subjects(stream: str, durable: str) -> str:
    """Where everything is said about what this consumer delivered."""
    return f"$JS.ACK.{stream}.{durable}.>"


def get_subject(stream: str, subject: str = "") -> str:
    """Direct gets. With a subject: of its newest message alone; without: of any message of the stream, which its payload names."""
    return api_subject(f"DIRECT.GET.{stream}.{subject}" if subject else f"DIRECT.GET.{stream}")


def leader_get_path(stream: str) -> str:
    """Of the API: single messages from the stream's leader, any of them, which the payload names."""
    return f"STREAM.MSG.GET.{stream}"


def create_path(stream: str, durable: str, filter_subject: str) -> str:
    """Of the API, for a durable that takes what the filter matches and nothing else."""
    return f"CONSUMER.CREATE.{stream}.{durable}.{filter_subject}"


def bucket_stream(bucket: str) -> str:
    return f"KV_{bucket}"


def key_subject(bucket: str, key: str) -> str:
    """`key` may be `>` to mean all."""
    return f"$KV.{bucket}.{key}"


def objects_stream(store: str) -> str:
    return f"OBJ_{store}"


def chunk_subject(store: str, upload: str) -> str:
    """`upload` may be `>` to mean all."""
    return f"$O.{store}.C.{upload}"


def meta_subject(store: str, encoded_name: str) -> str:
    """`encoded_name` may be `>` to mean all."""
    return f"$O.{store}.M.{encoded_name}"


def is_delivery(message: RawMessage) -> bool:
    """Whether somebody published it. A status alone proves nothing: a client may send a header of that name."""
    return message.reply.startswith("$JS.ACK.")


def is_stored(message: RawMessage) -> bool:
    """Whether an answer to a direct get is a message of the stream, and not the broker's remark."""
    return STREAM_HEADER in message.headers


def is_present(message: RawMessage) -> bool:
    """Whether a message of a bucket is a value: a purge, a delete and the broker's own mark of an expiry say that the key is gone."""
    return KV_OPERATION_HEADER not in message.headers and MARKER_REASON_HEADER not in message.headers


@dataclass(frozen=True, slots=True)
class DeliveryFacts:
    """What the broker says about a delivered message in the subject for its acknowledgement."""

    stream: str
    durable: str
    deliveries: int
    sequence: int
    stored_ns: int


def delivery_facts(reply: str) -> DeliveryFacts:
    """From `$JS.ACK.[<domain>.<account>.]<stream>.<consumer>.<delivered>.<stream seq>.<consumer seq>.<time>.<pending>[.<token>]`."""
    parts = reply.split(".")
    if len(parts) == 9 and parts[:2] == ["$JS", "ACK"]:
        tail = parts[2:]
    elif len(parts) >= 11 and parts[:2] == ["$JS", "ACK"]:
        tail = parts[4:]
    else:
        raise BusRejected(f"not an acknowledgement subject: {reply}")
    return DeliveryFacts(tail[0], tail[1], int(tail[2]), int(tail[3]), int(tail[5]))


def parse_json(message: RawMessage, doing: str) -> Json:
    """The fields of an answer, which may say `error`."""
    try:
        fields: Any = json.loads(message.data)
    except ValueError as error:
        raise BusRejected(f"{doing}: the answer is no JSON: {message.data[:80]!r} {dict(message.headers)}") from error
    if not isinstance(fields, dict):
        raise BusRejected(f"{doing}: the answer is no JSON object: {message.data[:80]!r}")
    return cast(Json, fields)


def refused(error: Json, doing: str) -> JetwakeError:
    return refusal(int(error.get("code", 0)), int(error.get("err_code", 0)), str(error.get("description", "")), doing)


async def api(bus: Bus, path: str, body: Mapping[str, Any] | None = None) -> Json:
    """Ask `$JS.API.<path>`."""
    payload = json.dumps(body).encode() if body is not None else b""
    answer = parse_json(await bus.request(api_subject(path), payload), path)
    if "error" in answer:
        raise refused(answer["error"], path)
    return answer


async def newest_message(bus: Bus, stream: str, subject: str) -> RawMessage | None:
    """As `last_message`, from the stream's leader: whatever was acknowledged before is seen. For what is decided by what is there."""
    return await _leaders_message(bus, stream, {"last_by_subj": subject})


async def message_at(bus: Bus, stream: str, sequence: int) -> RawMessage | None:
    """The message with this sequence, from the stream's leader."""
    return await _leaders_message(bus, stream, {"seq": sequence})


async def _leaders_message(bus: Bus, stream: str, question: Json) -> RawMessage | None:
    path = leader_get_path(stream)
    answer = await _from_leader(bus, path, json.dumps(question).encode())
    if answer is None:
        return None
    there: Json = answer["message"]
    facts = {STREAM_HEADER: stream, SUBJECT_HEADER: there["subject"], SEQUENCE_HEADER: str(there["seq"]), TIME_HEADER: there["time"]}
    own = read_headers(base64.b64decode(there.get("hdrs", "")))
    return RawMessage(there["subject"], base64.b64decode(there.get("data", "")), own | facts)


async def _from_leader(bus: Bus, path: str, question: bytes) -> Json | None:
    """None: there is no such message. In a cluster that has lost a server there may be no leader for some seconds, which shows as silence
    or as an answer that says so: then asked again.
    """
    clock = asyncio.get_running_loop().time
    give_up_s = clock() + (bus.missing_grace_s if bus.is_clustered else 0.0)
    while True:
        try:
            answer = parse_json(await bus.request(api_subject(path), question), path)
            if "error" not in answer:
                return answer
            if answer["error"].get("err_code") == _NO_MESSAGE_FOUND:
                return None
            raise refused(answer["error"], path)
        except BrokerUnavailable:
            if clock() >= give_up_s:
                raise
        await asyncio.sleep(_ASK_LEADER_AGAIN_S)


def read_headers(block: bytes) -> dict[str, str]:
    """As they are stored: a version line, one line each, an empty line."""
    pairs = (line.partition(":") for line in block.decode(errors="replace").split("\r\n")[1:] if line)
    return {name: value.strip() for name, _, value in pairs}


async def last_message(bus: Bus, stream: str, subject: str) -> RawMessage | None:
    """The newest message on a subject, by direct get; its subject and sequence are in the headers.

    In a cluster any replica answers, which may be some milliseconds behind; see `newest_message`.
    """
    answer = await bus.request(get_subject(stream, subject), b"")
    if is_stored(answer):
        return answer
    if answer.status == _NO_MESSAGE:
        return None
    raise BusRejected(f"reading {subject}: {answer.status} {answer.headers.get('Description', '')}")


async def stored_messages(bus: Bus, stream: str, subjects: str, first_sequence: int = 1, since_ns: int = 0) -> list[RawMessage]:
    """All messages on subjects that match, in order, by batched direct gets. For streams that are small, or one subject.

    `since_ns`: only those stored from this time of the broker on, in place of `first_sequence`.
    """
    found: list[RawMessage] = []
    start: Json = {"start_time": rfc3339(since_ns)} if since_ns > 0 else {"seq": first_sequence}
    while True:
        page = await _batch(bus, stream, {"batch": 1000, "next_by_subj": subjects, **start}, subjects)
        found += page
        if len(page) < 1000:
            return found
        start = {"seq": int(page[-1].headers[SEQUENCE_HEADER]) + 1}


def rfc3339(time_ns: int) -> str:
    """As the broker reads times, to the microsecond below."""
    seconds, rest_ns = divmod(time_ns, 1_000_000_000)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{rest_ns // 1000:06d}Z"


async def stored_page(bus: Bus, stream: str, subjects: str, first_sequence: int, count: int) -> list[RawMessage]:
    """Up to `count` messages on subjects that match, from this sequence on, by one batched direct get. Fewer: there are no more."""
    return await _batch(bus, stream, {"batch": count, "next_by_subj": subjects, "seq": first_sequence}, subjects)


async def stored_message(bus: Bus, stream: str, sequence: int) -> RawMessage | None:
    """The message with this sequence, by direct get."""
    answer = await bus.request(get_subject(stream), json.dumps({"seq": sequence}).encode())
    if is_stored(answer):
        return answer
    if answer.status == _NO_MESSAGE:
        return None
    raise BusRejected(f"reading {stream} {sequence}: {answer.status} {answer.headers.get('Description', '')}")


async def last_messages(bus: Bus, stream: str, subjects: str) -> list[RawMessage]:
    """The newest message on each subject that matches (up to 1,000), by one batched direct get."""
    return await _batch(bus, stream, {"multi_last": [subjects], "batch": 1000}, subjects)


async def _batch(bus: Bus, stream: str, question: Json, subjects: str) -> list[RawMessage]:
    found: list[RawMessage] = []

    def take(message: RawMessage) -> bool:
        if is_stored(message):
            found.append(message)
        return is_stored(message)

    end = await bus.request_many(get_subject(stream), json.dumps(question).encode(), take)
    if end.status in ("204", _NO_MESSAGE):
        return found
    raise refusal(int(end.status), 10059 if end.status == "503" else 0, end.headers.get("Description", "no stream"), f"reading {subjects}")
