"""Every stream, consumer and bucket as frozen data. `pipeline.topology` brings a broker to this state; nothing else declares any.

Sizes are defaults for one laptop; `TopologySettings` overrides those an operator sizes.
"""

from dataclasses import dataclass
from typing import Literal

from .subjects import NO_DOMAIN, handoff

DUPLICATE_WINDOW_S = 120
ACK_WAIT_S = 10
"""How long a worker may be silent about a message it holds; it reports every fifth of this."""
DECODE_ACK_WAIT_S = 6
"""What a dead decode worker had in hand waits as long: little more than it takes routers to see that a worker died."""
TAKEOVER_ACK_WAIT_S = 4
"""A router moves a job in milliseconds, and one that is moved twice is stored once: what it had in hand when it was cut off need not wait."""
DECODE_PULLS = 4096
"""A decode worker has a pull at the broker for each priority it asks at: up to ten."""


@dataclass(frozen=True)
class StreamSpec:
    """One JetStream stream. Sizes in messages and bytes, ages in seconds; 0 or -1 as NATS has them (no limit)."""

    name: str
    subjects: tuple[str, ...]
    retention: Literal["workqueue", "limits"]
    storage: Literal["file", "memory"]
    discard: Literal["new", "old"]
    max_messages: int = -1
    max_bytes: int = -1
    max_age_s: float = 0
    max_messages_per_subject: int = -1
    discard_new_per_subject: bool = False
    duplicate_window_s: float = DUPLICATE_WINDOW_S
    allow_direct: bool = False
    no_ack: bool = False
    replicas: int = 1


@dataclass(frozen=True)
class ConsumerSpec:
    """One durable pull consumer. `inactive_threshold_s` 0: it stays for ever. `max_ack_pending` -1: who asks for no more than it has room
    for needs no limit, and one that is full of what dead workers held would stop the queue. `priority_group`: pulls carry a priority,
    and the lowest number is served first.
    """

    stream: str
    durable: str
    filter_subject: str
    ack_wait_s: float = ACK_WAIT_S
    max_ack_pending: int = -1
    max_waiting: int = 512
    inactive_threshold_s: float = 0
    priority_group: str = ""


@dataclass(frozen=True)
class BucketSpec:
    """One key-value bucket. `marker_ttl_s`: expiries are told to watchers, and the mark kept this long."""

    name: str
    storage: Literal["file", "memory"]
    marker_ttl_s: float = 0
    max_bytes: int = 64 * 1024 * 1024
    replicas: int = 1


@dataclass(frozen=True)
class ObjectsSpec:
    """One object store: what every NATS client knows by this name."""

    name: str
    max_bytes: int = 16 << 30
    replicas: int = 1


REQUESTS = StreamSpec("JW_REQUESTS", ("jw.requests.*.*",), "workqueue", "file", "new", max_messages=20_000, max_bytes=4 << 30)
PREFILL = StreamSpec(
    "JW_PREFILL", ("jw.prefill.*",), "workqueue", "file", "new", max_messages_per_subject=256, discard_new_per_subject=True
)
HANDOFF = StreamSpec("JW_HANDOFF", ("jw.handoff.*.*",), "workqueue", "file", "new", max_messages=50_000, max_bytes=4 << 30)
REPLIES = StreamSpec(
    "JW_REPLIES", ("jw.replies.*.*",), "limits", "memory", "old", max_bytes=256 << 20, max_age_s=300, allow_direct=True, no_ack=True
)
ANSWERS = StreamSpec(
    "JW_ANSWERS", ("jw.answers.*.*.*",), "limits", "memory", "old",
    max_bytes=128 << 20, max_age_s=900, max_messages_per_subject=1, allow_direct=True, no_ack=True,
)  # fmt: skip
CLAIMS = StreamSpec(
    "JW_CLAIMS", ("jw.claims.*.*",), "limits", "memory", "old", max_bytes=64 << 20, max_age_s=300, max_messages_per_subject=1
)
RESULTS = StreamSpec("JW_RESULTS", ("jw.results.*.*.*",), "limits", "file", "old", max_bytes=4 << 30, max_age_s=86_400, allow_direct=True)
CANCEL = StreamSpec("JW_CANCEL", ("jw.cancel.*",), "limits", "memory", "old", max_bytes=64 << 20, max_age_s=900, allow_direct=True)
DEAD = StreamSpec("JW_DEAD", ("jw.dead.*",), "limits", "file", "old", max_bytes=1 << 30, max_age_s=7 * 86_400, allow_direct=True)
OPENAI_JOBS = StreamSpec(
    "JW_OPENAI_JOBS", ("jw.openai.jobs.>", "jw.openai.jobs-of.*.>"), "workqueue", "file", "new", max_messages=100_000, max_bytes=4 << 30
)
OPENAI_RESULTS = StreamSpec(
    "JW_OPENAI_RESULTS", ("jw.openai.results.*", "jw.openai.accepted.*", "jw.results-out.>"), "limits", "file", "old",
    max_bytes=1 << 30, max_age_s=86_400, duplicate_window_s=86_400, allow_direct=True,
)  # fmt: skip
OPENAI_BODIES = StreamSpec(
    "JW_OPENAI_BODIES", ("jw.openai-bodies.*.*", "jw.openai-readers.*"), "limits", "memory", "old",
    max_bytes=128 << 20, max_age_s=1800, max_messages_per_subject=1, allow_direct=True, no_ack=True,
)  # fmt: skip
EVENTS = StreamSpec(
    "JW_EVENTS", ("jw.events.*.*",), "limits", "file", "old", max_bytes=256 << 20, max_age_s=86_400, allow_direct=True, no_ack=True
)
BATCHES = StreamSpec("JW_BATCHES", ("jw.batches.*",), "workqueue", "file", "new", max_messages=100_000)
BATCH_LINES = StreamSpec(
    "JW_BATCH_LINES", ("jw.batchlines.*.*",), "limits", "file", "new", max_bytes=8 << 30, max_age_s=32 * 86_400, allow_direct=True
)

STREAMS = (
    REQUESTS,
    PREFILL,
    HANDOFF,
    REPLIES,
    ANSWERS,
    CLAIMS,
    RESULTS,
    CANCEL,
    DEAD,
    OPENAI_JOBS,
    OPENAI_RESULTS,
    OPENAI_BODIES,
    EVENTS,
    BATCHES,
    BATCH_LINES,
)

WORKERS_BUCKET = BucketSpec("jw_workers", "memory", marker_ttl_s=5)
MODELS_BUCKET = BucketSpec("jw_models", "file")
KEYS_BUCKET = BucketSpec("jw_keys", "file")
BATCHES_BUCKET = BucketSpec("jw_batches", "file", max_bytes=1 << 30)
BUCKETS = (WORKERS_BUCKET, MODELS_BUCKET, KEYS_BUCKET, BATCHES_BUCKET)

FILES = ObjectsSpec("jw_files")
OBJECTS = (FILES,)


def router_consumer(priority_class: str) -> ConsumerSpec:
    """Shared by all routers: one durable for each priority class."""
    return ConsumerSpec(REQUESTS.name, f"router-{priority_class}", f"jw.requests.*.{priority_class}")


def prefill_consumer(lane: str) -> ConsumerSpec:
    """One durable for each incarnation of a worker."""
    return ConsumerSpec(PREFILL.name, lane, f"jw.prefill.{lane}", inactive_threshold_s=300)


def takeover_consumer(lane: str) -> ConsumerSpec:
    """A router's own durable on the queue of a dead worker: only one router can have it."""
    return ConsumerSpec(PREFILL.name, f"takeover-{lane}", f"jw.prefill.{lane}", ack_wait_s=TAKEOVER_ACK_WAIT_S, inactive_threshold_s=60)


def decode_consumer(pool: str, token: str = NO_DOMAIN) -> ConsumerSpec:
    """Shared by the decode workers of a pool, for the handoffs of one topology domain (`subjects.domain_token`)."""
    durable = pool if token == NO_DOMAIN else f"{pool}={token}"
    return ConsumerSpec(
        HANDOFF.name, durable, handoff(pool, token), ack_wait_s=DECODE_ACK_WAIT_S, max_waiting=DECODE_PULLS, priority_group="decode"
    )


JOBS_CONSUMER = ConsumerSpec(OPENAI_JOBS.name, "openai-jobs", "jw.openai.jobs.>")
"""Shared by all gateways."""


def jobs_consumer_of(token: str) -> ConsumerSpec:
    """Shared by the gateways of one model, for the jobs that others passed on."""
    return ConsumerSpec(OPENAI_JOBS.name, f"openai-jobs-of-{token}", f"jw.openai.jobs-of.{token}.>")


ROUTER_CONSUMERS = (router_consumer("interactive"), router_consumer("batch"))
SHARED_CONSUMERS = (*ROUTER_CONSUMERS, JOBS_CONSUMER)
"""Those that are there before anybody fetches from them."""


def batch_consumer(model_token: str) -> ConsumerSpec:
    """Shared by the gateways of a model: whoever holds a job runs that batch."""
    return ConsumerSpec(BATCHES.name, f"batches-{model_token}", f"jw.batches.{model_token}")
