"""How to reach the broker, and how large its streams may grow: one frozen model each, an unknown key is an error.

Reads `schemas.streams` for everything that an operator does not size. Promises: `TopologySettings` is the only place where
declared sizes meet an operator's wishes, so `ensure_topology` and `drift` speak about the same state.
"""

from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from ..schemas import streams
from ..schemas.streams import BucketSpec, ObjectsSpec, StreamSpec


class BrokerSettings(BaseModel):
    """`url` may list several servers of one cluster, with commas between them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str = Field(
        default="nats://127.0.0.1:4222",
        description="several servers of one cluster have commas between them; a command that is told none takes the broker of the running `jetwake up`",
    )
    credentials: Path | None = Field(default=None, description="credentials file of a NATS user: JWT and seed")
    nkey_file: Path | None = Field(default=None, description="the seed of a user that the broker's configuration names")
    tls_ca: Path | None = Field(default=None, description="certificate of the authority that signed the server's")
    tls_cert: Path | None = Field(default=None, description="client certificate")
    tls_key: Path | None = Field(default=None, description="key of the client certificate")
    inbox_prefix: str = Field(default="_INBOX", description="one per user, else users can read each other's answers")
    name: str = Field(
        default="", pattern=r"^[A-Za-z0-9_-]{0,64}$", description="whose replies this user may read; empty: any name, where none is fixed"
    )
    peers: str = Field(
        default="", pattern=r"^[A-Za-z0-9_,-]*$", description="of a gateway: others whose streams it may resume, with commas between them"
    )
    topology: Literal["declare", "restore", "check"] = Field(
        default="declare",
        description="what this user may do about streams: make and change them, make those that are missing, or only wait",
    )
    connect_timeout_s: float = Field(default=10.0, gt=0, description="for the first connection; reconnecting goes on for ever")
    reconnect_wait_s: float = Field(default=0.25, gt=0, description="between two tries to reconnect")
    ping_interval_s: float = Field(default=10.0, gt=0, description="a half-open connection is noticed after two to three of these")
    request_timeout_s: float = Field(default=2.0, gt=0, description="for one answer of the broker")
    publish_deadline_s: float = Field(default=30.0, gt=0, description="how long one message is sent again before the caller hears of it")
    missing_grace_s: float = Field(
        default=3.0, ge=0, description="how long a missing stream may be one that a restarted broker still loads"
    )
    election_grace_s: float = Field(
        default=20.0,
        ge=0,
        description="the same where the broker is a cluster: one that lost a server may take so long to agree on leaders",
    )


class TopologySettings(BaseModel):
    """Sizes for one laptop; everything else about streams is fixed in `schemas.streams`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    replicas: int = Field(default=1, ge=1, le=5, description="servers of the cluster that keep each stream")
    max_requests: int = Field(default=20_000, ge=1, description="accepted requests that no router has taken; more are refused")
    requests_max_bytes: int = Field(default=4 << 30, ge=1 << 20, description="of requests that no router has taken")
    max_jobs_per_worker: int = Field(default=256, ge=1, description="prefill jobs in the queue of one worker")
    max_handoffs: int = Field(default=50_000, ge=1, description="handoffs that wait for a decode worker")
    handoffs_max_bytes: int = Field(default=4 << 30, ge=1 << 20, description="of handoffs that wait")
    replies_max_bytes: int = Field(default=256 << 20, ge=1 << 20, description="memory; the server's own use is about three times this")
    answers_max_bytes: int = Field(default=128 << 20, ge=1 << 20, description="memory; the tokens so far of what runs or ended lately")
    results_max_bytes: int = Field(default=4 << 30, ge=1 << 20, description="endings with their tokens; the oldest go first")
    results_max_age_s: float = Field(default=86_400, gt=0, description="how long an ending can be read")
    dead_max_bytes: int = Field(default=1 << 30, ge=1 << 20, description="dead letters; the oldest go first")
    max_openai_jobs: int = Field(default=100_000, ge=1, description="durable jobs that wait or run")
    openai_jobs_max_bytes: int = Field(default=4 << 30, ge=1 << 20, description="of durable jobs that wait or run")
    openai_results_max_bytes: int = Field(default=1 << 30, ge=1 << 20, description="results of durable jobs, kept for a day")
    openai_bodies_max_bytes: int = Field(
        default=128 << 20, ge=1 << 20, description="memory; bodies of streams, so that they can be resumed"
    )
    events_max_bytes: int = Field(default=256 << 20, ge=1 << 20, description="events of finished requests; the oldest go first")
    batch_lines_max_bytes: int = Field(default=8 << 30, ge=1 << 20, description="results of batches that are not complete yet")
    files_max_bytes: int = Field(default=16 << 30, ge=1 << 20, description="uploaded files and the results of batches")

    def streams(self) -> tuple[StreamSpec, ...]:
        sized = (
            replace(streams.REQUESTS, max_messages=self.max_requests, max_bytes=self.requests_max_bytes),
            replace(streams.PREFILL, max_messages_per_subject=self.max_jobs_per_worker),
            replace(streams.HANDOFF, max_messages=self.max_handoffs, max_bytes=self.handoffs_max_bytes),
            replace(streams.REPLIES, max_bytes=self.replies_max_bytes),
            replace(streams.ANSWERS, max_bytes=self.answers_max_bytes),
            replace(streams.OPENAI_JOBS, max_messages=self.max_openai_jobs, max_bytes=self.openai_jobs_max_bytes),
            replace(streams.OPENAI_RESULTS, max_bytes=self.openai_results_max_bytes),
            replace(streams.OPENAI_BODIES, max_bytes=self.openai_bodies_max_bytes),
            replace(streams.EVENTS, max_bytes=self.events_max_bytes),
            replace(streams.RESULTS, max_bytes=self.results_max_bytes, max_age_s=self.results_max_age_s),
            replace(streams.DEAD, max_bytes=self.dead_max_bytes),
            replace(streams.BATCH_LINES, max_bytes=self.batch_lines_max_bytes),
        )
        named = {spec.name: spec for spec in sized}
        return tuple(replace(named.get(spec.name, spec), replicas=self.replicas) for spec in streams.STREAMS)

    def buckets(self) -> tuple[BucketSpec, ...]:
        return tuple(replace(bucket, replicas=self.replicas) for bucket in streams.BUCKETS)

    def objects(self) -> tuple[ObjectsSpec, ...]:
        return tuple(replace(store, max_bytes=self.files_max_bytes, replicas=self.replicas) for store in streams.OBJECTS)
