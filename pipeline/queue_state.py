"""What waits in the three work queues, and since when. Reads the JetStream API; writes nothing."""

from dataclasses import dataclass

from ..schemas.errors import BusRejected, StreamMissing
from ..schemas.streams import HANDOFF, PREFILL, REQUESTS
from .clock import timestamp_ns
from .connection import Bus
from .jetstream import Json, api
from .topology import consumers_of


@dataclass(frozen=True, slots=True)
class QueueState:
    """One consumer of a work queue. `waiting`: held by nobody; `oldest_ns`: when the first of these was stored, 0 for none."""

    stream: str
    subject: str
    waiting: int
    in_hand: int
    oldest_ns: int = 0


async def queue_states(bus: Bus) -> list[QueueState]:
    """Raises BusError."""
    states: list[QueueState] = []
    for stream in (REQUESTS.name, PREFILL.name, HANDOFF.name):
        for consumer in await consumers_of(bus, stream):
            subject = str(consumer["config"].get("filter_subject", ""))
            waiting = int(consumer.get("num_pending", 0))
            delivered = int(consumer["delivered"]["stream_seq"])
            oldest_ns = await _stored_ns(bus, stream, subject, delivered + 1) if waiting else 0
            states.append(QueueState(stream, subject, waiting, int(consumer.get("num_ack_pending", 0)), oldest_ns))
    return states


async def _stored_ns(bus: Bus, stream: str, subject: str, from_sequence: int) -> int:
    """When the first message from there on was stored; 0 when it is gone by now."""
    try:
        found: Json = await api(bus, f"STREAM.MSG.GET.{stream}", {"seq": from_sequence, "next_by_subj": subject})
    except (StreamMissing, BusRejected):
        return 0
    return timestamp_ns(str(found["message"]["time"]))
