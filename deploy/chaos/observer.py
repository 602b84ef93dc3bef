"""What is looked at from outside, on a connection that no fault touches but the broker's own: replies on the wire, stored ends,
and what the system has when it is idle.
"""

import asyncio
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ...pipeline.connection import Bus, RawMessage
from ...pipeline.jetstream import bucket_stream, is_present, key_subject, last_messages, newest_message, stored_messages
from ...pipeline.topology import durables, stream_counts, subject_counts
from ...schemas import subjects
from ...schemas.codec import decode
from ...schemas.errors import BrokerUnavailable, BusError, Undecodable
from ...schemas.replies import AnyTerminal, Fence, Outcome, Reply, TokenChunk
from ...schemas.streams import BUCKETS, HANDOFF, PREFILL, REQUESTS, RESULTS, WORKERS_BUCKET
from ...schemas.tokens import unpack_tokens
from ...schemas.workers import WorkerCard, WorkerLoad
from .ledger import Heard, Record, token_fault

_REPLY: Any = Reply
_OUTCOME: Any = Outcome
WORK_QUEUES = (REQUESTS.name, PREFILL.name, HANDOFF.name)
ASK_AGAIN_S = 0.3


class Observer:
    """`records` is filled by the load. `start` before the first request."""

    def __init__(self, bus: Bus, records: Mapping[str, Record]) -> None:
        self.bus = bus
        self._records = records
        self._started_s = time.monotonic()
        self._loads: dict[str, WorkerLoad] = {}

    async def start(self) -> None:
        self._started_s = time.monotonic()
        await self.bus.subscribe("jw.replies.>", self._on_reply)
        await self.bus.subscribe(subjects.LOADS, self._on_load)
        await self.bus.flush()

    def _on_reply(self, message: RawMessage) -> None:
        record = self._records.get(subjects.last_token(message.subject))
        if record is None:
            return
        after_s = round(time.monotonic() - self._started_s, 3)
        try:
            reply: TokenChunk | AnyTerminal = decode(message.data, _REPLY)
        except Undecodable as error:
            record.wire_faults.append(("foreign", f"on the wire: {error}"))
            return
        if isinstance(reply, TokenChunk):
            tokens, text = unpack_tokens(reply.tokens), ""
            fault = token_fault(tokens, record.expected, reply.offset)
            if fault is not None:
                record.wire_faults.append((fault[0], f"on the wire, attempt {reply.attempt}: {fault[1]}"))
            record.wire.append(Heard(after_s, reply.attempt, reply.offset, len(tokens), text))
        else:
            record.wire.append(Heard(after_s, reply.attempt, 0, len(reply.tokens) // 4, reply.type))

    def _on_load(self, message: RawMessage) -> None:
        load = decode(message.data, WorkerLoad)
        self._loads[f"{load.worker}-{load.incarnation}"] = load

    # -- what is stored -----------------------------------------------------------------------------------------------

    async def ends_of(self, records: Collection[Record], model: str) -> tuple[dict[str, AnyTerminal], dict[str, int]]:
        """The stored terminals by request id, and how many there are of each."""
        stored = await subject_counts(self.bus, RESULTS.name)
        ends, counts = dict[str, AnyTerminal](), dict[str, int]()
        for record in records:
            subject = subjects.result(model, record.client, record.request_id)
            if subject not in stored:
                continue
            # Fences of attempts are there too, and before the terminal.
            messages = await self._all_of(subject, stored[subject]) if stored[subject] > 1 else []
            last = await newest_message(self.bus, RESULTS.name, subject)
            outcomes: list[AnyTerminal | Fence] = [decode(message.data, _OUTCOME) for message in messages or [last] if message]
            terminals = [outcome for outcome in outcomes if not isinstance(outcome, Fence)]
            if terminals:
                ends[record.request_id], counts[record.request_id] = terminals[0], len(terminals)
        return ends, counts

    async def _all_of(self, subject: str, count: int) -> list[RawMessage]:
        """In a cluster, whoever is asked may be a little behind."""
        for _ in range(20):
            messages = await stored_messages(self.bus, RESULTS.name, subject)
            if len(messages) >= count:
                return messages
            await asyncio.sleep(0.1)
        raise BrokerUnavailable(f"{count} messages are stored on {subject}, and cannot be read")

    # -- what there is when nothing happens ---------------------------------------------------------------------------

    async def picture(self, counts_used_blocks: bool) -> "Picture":
        """Raises BusError while the broker is away."""
        cards = await self.cards()
        lanes = {card.lane: card.worker for card in cards}
        streams = await stream_counts(self.bus)
        consumers = [f"{stream}/{name_of(durable, lanes)}" for stream in streams for durable in await durables(self.bus, stream)]
        loads = [self._loads[card.lane] for card in cards if card.lane in self._loads]
        keys = {bucket.name: len(await self._keys(bucket.name)) for bucket in BUCKETS}
        return Picture(
            workers=sorted(f"{card.worker} {card.state}" for card in cards if card.lane in self._loads),
            streams=sorted(streams),
            consumers=sorted(consumers),
            queued={name: streams[name].messages for name in WORK_QUEUES if name in streams and streams[name].messages},
            keys=keys,
            blocks_held=sum(load.held_blocks + (load.used_blocks if counts_used_blocks else 0) for load in loads),
            running=sum(load.running_requests for load in loads),
        )

    async def picture_soon(self, counts_used_blocks: bool, wanted: "Picture | None", timeout_s: float) -> "Picture":
        """As soon as it shows what is wanted (None: a system at rest), or what it shows then."""
        clock, seen = asyncio.get_running_loop().time, Picture()
        deadline = clock() + timeout_s
        while clock() < deadline:
            try:
                seen = await self.picture(counts_used_blocks)
            except BusError:
                continue  # each question has its own patience
            if seen == wanted or (wanted is None and not seen.queued and not seen.blocks_held and not seen.running):
                break
            await asyncio.sleep(ASK_AGAIN_S)
        return seen

    async def cards(self) -> list[WorkerCard]:
        stream, key = bucket_stream(WORKERS_BUCKET.name), key_subject(WORKERS_BUCKET.name, ">")
        return [decode(message.data, WorkerCard) for message in await last_messages(self.bus, stream, key) if is_present(message)]

    async def _keys(self, bucket: str) -> list[RawMessage]:
        messages = await last_messages(self.bus, bucket_stream(bucket), key_subject(bucket, ">"))
        return [message for message in messages if is_present(message)]


@dataclass(frozen=True)
class Picture:
    """Of an idle system. `consumers` by stream, a worker's own under its name, whatever its incarnation. `queued`: what is not empty."""

    workers: list[str] | None = None
    streams: list[str] | None = None
    consumers: list[str] | None = None
    queued: dict[str, int] | None = None
    keys: dict[str, int] | None = None
    blocks_held: int = 0
    running: int = 0


def name_of(durable: str, lanes: Mapping[str, str]) -> str:
    return lanes.get(durable, durable)


def differences(before: Picture, after: Picture) -> list[str]:
    """A line for each thing that is not as it was, blocks apart. Pure."""
    lines = list[str]()
    for name, was, now in (
        ("workers", before.workers, after.workers),
        ("streams", before.streams, after.streams),
        ("consumers", before.consumers, after.consumers),
    ):
        missing, more = subtracted(was or [], now or []), subtracted(now or [], was or [])
        if missing:
            lines.append(f"{name} missing: {', '.join(missing)}")
        if more:
            lines.append(f"{name} left over: {', '.join(more)}")
    for name, was, now in (("messages in queues", before.queued, after.queued), ("keys", before.keys, after.keys)):
        if was != now:
            lines.append(f"{name}: {now}, before {was}")
    if after.running:
        lines.append(f"{after.running} requests still in hand")
    return lines


def subtracted(names: list[str], others: list[str]) -> list[str]:
    rest = list(names)
    for name in others:
        if name in rest:
            rest.remove(name)
    return rest
