"""What a router, a worker, its engine and a local system are told: frozen models, an unknown key is an error.

Pure. `configuration` fills them from a file, the environment and flags; `app`, `worker` and `local` are built with them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..consumers.simulated_settings import SimulatedShape
from ..producers.policies import DEFAULT_POLICY, KvAwareKnobs
from ..schemas.codec import first_complaint
from ..schemas.errors import SetupError
from ..schemas.workers import Role
from .log_lines import LogFormat, LogLevel
from .options import parse_options

NAME = r"^[A-Za-z0-9_-]{1,64}$"

Model = TypeVar("Model", bound=BaseModel)


class WorkerSettings(BaseModel):
    """One worker, whatever its role."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=NAME, description="unique in the fleet; auto: the role and the name of this machine; else the role and -1")
    role: Role
    domain: str = Field(default="", description="where it stands (a rack, a host): decode workers there take its handoffs first")
    held_blocks_share: float = Field(
        default=0.5, gt=0.0, le=1.0, description="it stops fetching while more than this share of its KV cache waits to be pulled"
    )
    hold_s: float = Field(default=120.0, gt=0.0, description="how long a handoff may wait unclaimed before its blocks are freed")
    lease_s: float = Field(default=30.0, gt=0.0, description="how far ahead the lease of blocks that wait is renewed")
    room_limit_s: float = Field(
        default=20.0, gt=0.0, description="how long a request in hand may wait for KV blocks; then another worker has it"
    )
    stall_limit_s: float = Field(default=30.0, gt=0.0, description="an engine that holds work and makes no progress for so long is stuck")
    grace_s: float = Field(default=30.0, gt=0.0, description="how long work in hand may take to end in a drain; then others do it")


class RouterSettings(BaseModel):
    """One router."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(default="router-1", pattern=NAME, description="unique among routers; auto: router and the name of this machine")
    policy: str = Field(default=DEFAULT_POLICY, description="kv_aware, least_loaded, power_of_two, random or round_robin")
    seed: int = Field(default=0, description="of what the policy draws")
    max_index_blocks: int = Field(default=2_000_000, ge=1, description="distinct KV blocks remembered over all workers")
    direct_max_new_tokens: int = Field(
        default=0, ge=0, description="prompts of which no more must be computed may skip the prefill worker; 0: none may"
    )
    overlap_weight: float = Field(default=1.0, ge=0.0, description="what a cached token is worth; 0: caches are ignored, 1: what it saves")
    load_weight: float = Field(
        default=1.0, ge=0.0, description="what a second of queued work counts; 0: load is ignored, above 1: spread more"
    )
    temperature_s: float = Field(
        default=0.0, ge=0.0, description="workers within about so many seconds of the best are taken too; 0: only the best"
    )
    session_affinity_s: float = Field(
        default=0.0, ge=0.0, description="how much sooner another worker must be to get the next turn of a session"
    )
    decode_weight: float = Field(
        default=KvAwareKnobs.decode_weight, ge=0.0, description="what a token in a KV cache that is decoded from counts, in prompt tokens"
    )
    room_wait_s: float = Field(
        default=KvAwareKnobs.room_wait_s, ge=0.0, description="until a whole KV cache in use is given back, for requests that find no room"
    )
    hold_s: float = Field(
        default=KvAwareKnobs.hold_s, ge=0.0, description="the longest that a request is kept for want of a free worker; 0: not at all"
    )
    lead: float = Field(
        default=KvAwareKnobs.lead, ge=0.0, description="how long before a worker is free it gets its next request, in shortest prefills"
    )
    far_pull_s: float = Field(
        default=KvAwareKnobs.far_pull_s, ge=0.0, description="what a prefill worker counts longer that would hand off to another domain"
    )
    approximate_s: float = Field(
        default=0.0, ge=0.0, description="for engines without cache events: believe own decisions this long, and nothing else"
    )
    slots: int = Field(default=64, ge=1, description="requests it decides on at the same time")
    grace_s: float = Field(default=10.0, gt=0.0, description="how long what it holds may take to be routed when it stops")

    @property
    def direct(self) -> bool:
        """Whether prompts may go to decode workers, so that their caches matter to it."""
        return self.policy == "kv_aware" and self.direct_max_new_tokens > 0

    def knobs(self) -> KvAwareKnobs:
        return KvAwareKnobs(
            overlap_weight=self.overlap_weight,
            load_weight=self.load_weight,
            temperature_s=self.temperature_s,
            session_affinity_s=self.session_affinity_s,
            direct_max_new_tokens=self.direct_max_new_tokens,
            decode_weight=self.decode_weight,
            room_wait_s=self.room_wait_s,
            hold_s=self.hold_s,
            lead=self.lead,
            far_pull_s=self.far_pull_s,
        )


class EngineSettings(BaseModel):
    """Which engine a worker runs, with which model. What the engine itself is told has a model of its own for each kind."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str = Field(default="vllm", description="vllm, or simulated (no model: for tests and scale)")
    model: str = Field(default="demo", description="demo, tiny (random weights), a folder, or a Hugging Face name")
    served_model_name: str = Field(default="", description="the name requests use; empty: the model as given")


class SimulatedOptions(SimulatedShape):
    """What a simulated engine is told from outside: its pace by name."""

    timing: str = Field(default="zero", description="zero, dynamo-default, MODEL@GPU, or a file that `jetwake profile` wrote")
    speed: float = Field(default=1.0, gt=0.0, description="how many times faster than its timing it runs")


class UpSettings(BaseModel):
    """What `jetwake up` starts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prefill: int = Field(default=1, ge=0, description="prefill workers")
    decode: int = Field(default=1, ge=0, description="decode workers")
    aggregated: int = Field(default=0, ge=0, description="workers that do both")
    gateway: bool = Field(default=True, description="serve the OpenAI API")
    store: Path | None = Field(default=None, description="folder of broker data and logs, kept; else a temporary one")


class TelemetrySettings(BaseModel):
    """What a process tells of itself, and where. Where traces and metrics are pushed to is said by the standard OTEL_* variables."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    metrics_port: int | None = Field(default=None, ge=0, le=65535, description="serve Prometheus metrics there; 0: any free port")
    metrics_host: str = Field(default="127.0.0.1", description="address of that port")
    log_format: LogFormat = Field(default="text", description="json: one object a line")
    log_level: LogLevel = Field(default="info", description="the least that is worth a line")


def built(kind: type[Model], what: str, configured: Mapping[str, Any], flag: str, options: Sequence[str], /, **own: Any) -> Model:
    """The settings from what is configured, `key=value` options over it, and flags of their own over both. Raises SetupError.

    An option may not say what has a flag of its own.
    """
    given = parse_options(options, flag)
    doubled = sorted(own.keys() & given.keys())
    if doubled:
        raise SetupError(f"{flag} takes no {' or '.join(doubled)}: there are options of their own")
    try:
        return kind(**{**configured, **given, **own})
    except ValidationError as error:
        known = ", ".join(sorted(kind.model_fields.keys() - own.keys()))
        raise SetupError(f"{what} {first_complaint(error)}; there are: {known}") from error


def router_settings(name: str, policy: str, options: Sequence[str], configured: Mapping[str, Any] | None = None) -> RouterSettings:
    return built(RouterSettings, "router option", configured or {}, "--router-option", options, name=name, policy=policy)


def worker_settings(
    name: str, role: Role, domain: str, options: Sequence[str], configured: Mapping[str, Any] | None = None
) -> WorkerSettings:
    return built(WorkerSettings, "worker option", configured or {}, "--worker-option", options, name=name, role=role, domain=domain)
