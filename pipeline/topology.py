"""Brings the broker's streams, consumers and buckets to the declared state, and tells how far it is from it.

Reads `schemas.streams` through `TopologySettings`; writes the JetStream API. Promises: doing it twice changes nothing the
second time; nothing is ever deleted here but a consumer or a stream in memory by its name; what cannot be changed on a live stream (retention,
storage) is an error in the broker's own words; a stream that is made anew gives no sequence of the one before again (dead letters
apart). A consumer that cannot be changed is made anew: its messages stay in the stream, and what somebody held is delivered again.
"""

import asyncio
import logging
from dataclasses import dataclass

from ..schemas.errors import BrokerUnavailable, BusRejected, NotPermitted, StreamExists, StreamMissing
from ..schemas.streams import DEAD, HANDOFF, PREFILL, REQUESTS, SHARED_CONSUMERS, ConsumerSpec
from ..schemas.subjects import MESSAGE_ID_HEADER
from .clock import timestamp_ns
from .connection import Bus
from .declarations import consumer_config, declared_streams, difference_of, fixed_otherwise
from .jetstream import Json, api, create_path, message_at
from .settings import TopologySettings

logger = logging.getLogger(__name__)

_ASK_AGAIN_S = 0.1


@dataclass(frozen=True, slots=True)
class QueueCount:
    """Messages nobody holds yet, and messages some consumer holds. `delivered`: deliveries so far, each time of a message counted."""

    pending: int
    in_progress: int
    delivered: int = 0


@dataclass(frozen=True, slots=True)
class StreamCount:
    messages: int
    size_bytes: int


async def ensure_topology(bus: Bus, settings: TopologySettings) -> list[str]:
    """Creates and updates; a line for each thing that was created or changed."""
    done: list[str] = []
    for config in declared_streams(settings):
        done += await _ensure_stream(bus, config)
    for spec in SHARED_CONSUMERS:
        difference = await _consumer_difference(bus, spec)
        if difference:
            await ensure_consumer(bus, spec)
            done.append(f"consumer {spec.stream}/{spec.durable}: {difference}")
    return done


async def restore_missing(bus: Bus, settings: TopologySettings) -> list[str]:
    """Creates the streams that are not there, with their shared consumers; a line for each. One question when none is missing.

    What is there is left as it is: another process may declare it otherwise.
    """
    names = await missing_streams(bus, settings)
    made = [config["name"] for config in declared_streams(settings) if config["name"] in names and await _create(bus, config)]
    for spec in SHARED_CONSUMERS:
        if spec.stream in names:
            await ensure_consumer(bus, spec)
    return [f"stream {name}" for name in made]


async def missing_streams(bus: Bus, settings: TopologySettings) -> list[str]:
    """The names of those that are declared and not there."""
    there = set(await _stream_names(bus))
    return [config["name"] for config in declared_streams(settings) if config["name"] not in there]


async def drift(bus: Bus, settings: TopologySettings) -> list[str]:
    """A line for each thing that is not as declared. Changes nothing."""
    lines: list[str] = []
    for config in declared_streams(settings):
        difference = difference_of(await _info(bus, f"STREAM.INFO.{config['name']}"), config)
        if difference:
            lines.append(f"stream {config['name']}: {difference}")
    for spec in SHARED_CONSUMERS:
        difference = await _consumer_difference(bus, spec)
        if difference:
            lines.append(f"consumer {spec.stream}/{spec.durable}: {difference}")
    return lines


async def ensure_consumer(bus: Bus, spec: ConsumerSpec) -> None:
    """Creates or updates one durable; one of an earlier version that cannot be updated is made anew.

    Raises StreamMissing when its stream is not there, and NotPermitted when this user may not make it anew.
    """
    path = create_path(spec.stream, spec.durable, spec.filter_subject)
    question = {"stream_name": spec.stream, "config": consumer_config(spec), "action": ""}
    try:
        await _asked_until_agreed(bus, path, question)
    except BusRejected as error:
        old = fixed_otherwise(await _info(bus, f"CONSUMER.INFO.{spec.stream}.{spec.durable}"), consumer_config(spec))
        if not old:
            raise
        logger.warning("consumer %s/%s is of an earlier version (%s) and is made anew", spec.stream, spec.durable, old)
        try:
            await delete_consumer(bus, spec.stream, spec.durable)
        except NotPermitted as refused:
            raise NotPermitted(
                f"{error}; consumer {spec.stream}/{spec.durable} is of an earlier version ({old}), and this user may not delete it:"
                " `jetwake nats declare` as the admin makes it anew, and loses no message"
            ) from refused
        await _asked_until_agreed(bus, path, question)


async def _asked_until_agreed(bus: Bus, path: str, question: Json) -> None:
    """For what may be asked twice. The servers of a cluster agree on a new consumer first, and a busy one takes its time."""
    clock = asyncio.get_running_loop().time
    give_up_s = clock() + (bus.missing_grace_s if bus.is_clustered else 0.0)
    while True:
        try:
            await api(bus, path, question)
            return
        except BrokerUnavailable:
            if clock() >= give_up_s:
                raise
            await asyncio.sleep(_ASK_AGAIN_S)


async def leaderless_in_memory(bus: Bus, settings: TopologySettings) -> dict[str, int]:
    """Of a cluster: the declared streams in memory that are there and have no leader now, and when each was made (ns, broker's time)."""
    found = dict[str, int]()
    for config in declared_streams(settings):
        if config["storage"] == "memory":
            info = await _info(bus, f"STREAM.INFO.{config['name']}")
            if info and (cluster := info.get("cluster")) and not cluster.get("leader"):
                found[config["name"]] = timestamp_ns(str(info["created"]))
    return found


async def delete_stream_in_memory(bus: Bus, settings: TopologySettings, name: str) -> bool:
    """Takes it away with all that is in it. False when it was not there. Raises ValueError for any other stream."""
    if name not in (config["name"] for config in declared_streams(settings) if config["storage"] == "memory"):
        raise ValueError(f"{name} is no stream in memory")
    try:
        await api(bus, f"STREAM.DELETE.{name}")
    except StreamMissing:
        return False
    return True


async def delete_consumer(bus: Bus, stream: str, durable: str) -> bool:
    """Takes a durable away; its messages stay in the stream. False when it was not there."""
    try:
        await api(bus, f"CONSUMER.DELETE.{stream}.{durable}")
    except StreamMissing:
        return False
    return True


async def delete_message(bus: Bus, stream: str, sequence: int, message_id: str = "") -> bool:
    """Takes one message out of a stream, whoever holds it. False when it was not there (any more).

    `message_id`: only if that is its id. A broker that does not sync at once may give a sequence again after a power cut.
    """
    try:
        if message_id:
            there = await message_at(bus, stream, sequence)
            if there is None or there.headers.get(MESSAGE_ID_HEADER) != message_id:
                return False
        await api(bus, f"STREAM.MSG.DELETE.{stream}", {"seq": sequence, "no_erase": True})
    except BusRejected:
        return False
    return True


async def purge(bus: Bus, stream: str, subjects: str) -> int:
    """Takes all messages on the subjects that match out of a stream; how many there were. Raises BusError."""
    return int((await api(bus, f"STREAM.PURGE.{stream}", {"filter": subjects})).get("purged", 0))


async def durables(bus: Bus, stream: str) -> list[str]:
    """The names of a stream's consumers; a stream that is not there has none."""
    return [str(consumer["name"]) for consumer in await consumers_of(bus, stream)]


async def consumer_count(bus: Bus, spec: ConsumerSpec) -> QueueCount | None:
    """None when that consumer, or its stream, is not there."""
    info = await _info(bus, f"CONSUMER.INFO.{spec.stream}.{spec.durable}")
    return None if info is None else _count(info)


async def stream_created_ns(bus: Bus, stream: str) -> int | None:
    """By the broker's clock. None when it is not there. One that is younger than its users was lost and made anew."""
    info = await _info(bus, f"STREAM.INFO.{stream}")
    return None if info is None else timestamp_ns(str(info["created"]))


async def queue_progress(bus: Bus, stream: str) -> tuple[int, int]:
    """Of a work queue: messages in it, and messages that ever left it. Raises BusError."""
    state = (await api(bus, f"STREAM.INFO.{stream}"))["state"]
    messages = int(state["messages"])
    return messages, int(state["last_seq"]) - messages


async def consumer_counts(bus: Bus) -> dict[str, QueueCount]:
    """By filter subject, for every consumer of the three work queues. A stream that is not there has none."""
    counts: dict[str, QueueCount] = {}
    for stream in (REQUESTS.name, PREFILL.name, HANDOFF.name):
        for consumer in await consumers_of(bus, stream):
            subject = str(consumer["config"].get("filter_subject", ""))
            counts[subject] = _count(consumer)
    return counts


def _count(info: Json) -> QueueCount:
    delivered: Json = info.get("delivered") or {}
    return QueueCount(int(info.get("num_pending", 0)), int(info.get("num_ack_pending", 0)), int(delivered.get("consumer_seq", 0)))


async def subject_counts(bus: Bus, stream: str, subjects: str = ">") -> dict[str, int]:
    """Stored messages for each subject of a stream that matches, owned or not: what the sweep for queues without a living owner reads."""
    counts: dict[str, int] = {}
    while True:
        page = await _info(bus, f"STREAM.INFO.{stream}", {"subjects_filter": subjects, "offset": len(counts)})
        state: Json = page["state"] if page else {}
        found: dict[str, int] = state.get("subjects") or {}
        counts |= found
        if not found or len(counts) >= int(page["total"] if page and "total" in page else 0):
            return counts


async def stream_counts(bus: Bus) -> dict[str, StreamCount]:
    """By stream name, for every stream of this account."""
    counts: dict[str, StreamCount] = {}
    while True:
        page = await api(bus, "STREAM.LIST", {"offset": len(counts)})
        streams: list[Json] = page.get("streams") or []
        for info in streams:
            state = info["state"]
            counts[str(info["config"]["name"])] = StreamCount(int(state["messages"]), int(state["bytes"]))
        if not streams or len(counts) >= int(page.get("total", 0)):
            return counts


async def nothing_lost_since_ns(bus: Bus, stream: str) -> int:
    """From when on (broker's time) every message that was ever stored in this stream of single messages is still there.

    One that is kept in memory is made anew where a lone server restarts; where there are several, only what is there can prove it.
    Raises StreamMissing, BrokerUnavailable.
    """
    info = await api(bus, f"STREAM.INFO.{stream}")
    state, config = info["state"], info["config"]
    untouched = int(state["first_seq"]) <= int(config.get("first_seq") or 1)
    if untouched and not bus.is_clustered:
        return timestamp_ns(str(info["created"]))
    return timestamp_ns(str(state["first_ts"])) if state["messages"] else timestamp_ns(str(info["ts"]))


async def streams_not_whole(bus: Bus) -> list[str]:
    """Of a cluster: the streams and consumers without a leader, or with a replica that is away or behind, and what it is. None where there
    is no cluster.
    """
    found: list[str] = []
    for name in await _stream_names(bus):
        info = await _info(bus, f"STREAM.INFO.{name}")
        there = [] if info is None else [info, *await consumers_of(bus, name)]
        found += [f"{each.get('name', name)}: {what}" for each in there if (what := _what_is_not_whole(each.get("cluster") or {}))]
    return found


def _what_is_not_whole(cluster: Json) -> str:
    if not cluster:
        return ""
    if not cluster.get("leader"):
        return "no leader"
    replicas: list[Json] = cluster.get("replicas") or []
    away = [f"{replica.get('name')} is offline" for replica in replicas if replica.get("offline")]
    behind = [replica for replica in replicas if not replica.get("offline") and not replica.get("current")]
    return ", ".join(away + [f"{replica.get('name')} is not up to date (behind by {replica.get('lag', 0)})" for replica in behind])


async def _stream_names(bus: Bus) -> list[str]:
    names: list[str] = []
    while True:
        page = await api(bus, "STREAM.NAMES", {"offset": len(names)})
        found: list[str] = page.get("streams") or []
        names += found
        if not found or len(names) >= int(page.get("total", 0)):
            return names


async def consumers_of(bus: Bus, stream: str) -> list[Json]:
    """What the broker says of each consumer of a stream; one that is not there has none."""
    found: list[Json] = []
    while True:
        page = await _info(bus, f"CONSUMER.LIST.{stream}", {"offset": len(found)})
        consumers: list[Json] = (page or {}).get("consumers") or []
        found += consumers
        if page is None or not consumers or len(found) >= int(page.get("total", 0)):
            return found


async def _ensure_stream(bus: Bus, config: Json) -> list[str]:
    name = config["name"]
    there = await _info(bus, f"STREAM.INFO.{name}")
    if there is None:
        if await _create(bus, config):
            return [f"stream {name}: missing"]
        there = await _info(bus, f"STREAM.INFO.{name}")
    difference = difference_of(there, config)
    if difference:
        await api(bus, f"STREAM.UPDATE.{name}", {**(there or {}).get("config", {}), **config})
    return [f"stream {name}: {difference}"] if difference else []


async def _create(bus: Bus, config: Json) -> bool:
    """False when somebody else was faster, whatever they declared.

    The stream counts from the broker's time in microseconds, so that one that was lost or deleted never gives a sequence again: whatever
    was said about an earlier message (an acknowledgement that comes late, a revision, how far a queue was taken) is about none of this
    stream. Dead letters count from 1, because people type these numbers.
    """
    name = config["name"]
    if name != DEAD.name:
        now_ns = timestamp_ns(str((await api(bus, f"STREAM.INFO.{DEAD.name}"))["ts"]))
        config = config | {"first_seq": now_ns // 1000}
    try:
        await api(bus, f"STREAM.CREATE.{name}", config)
    except StreamExists:
        await _until_there(bus, name)
        return False
    return True


async def _until_there(bus: Bus, name: str) -> None:
    """For a stream that somebody else makes now: the servers of a cluster know its name before they know it."""
    clock = asyncio.get_running_loop().time
    give_up_s = clock() + bus.missing_grace_s
    while await _info(bus, f"STREAM.INFO.{name}") is None:
        if clock() >= give_up_s:
            raise BrokerUnavailable(f"stream {name} is being made by somebody else, and does not come")
        await asyncio.sleep(_ASK_AGAIN_S)


async def _consumer_difference(bus: Bus, spec: ConsumerSpec) -> str:
    return difference_of(await _info(bus, f"CONSUMER.INFO.{spec.stream}.{spec.durable}"), consumer_config(spec))


async def _info(bus: Bus, path: str, body: Json | None = None) -> Json | None:
    """None when it is not there. JetStream itself missing is no such case: then the API does not answer at all."""
    try:
        return await api(bus, path, body)
    except StreamMissing:
        return None
