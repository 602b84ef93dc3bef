"""Read by routers, clients and operators: who is alive, what they can do, and how busy they are.

Cards live in the bucket `jw_workers` and expire; models live in `jw_models` and stay when the last worker goes (so that
requests wait for a worker instead of being refused); load is a plain message several times a second.
"""

import hashlib
from typing import Literal

from pydantic import Field

from .codec import Message
from .requests import SafeToken

Role = Literal["prefill", "decode", "aggregated"]


class KvCompatibility(Message):
    """What must be equal on both ends of a KV transfer. Workers exchange KV only inside one pool, and a pool is one of these."""

    engine: str
    engine_version: str
    nixl_version: str
    model: str
    revision: str
    dtype: str
    kv_dtype: str
    block_size_tokens: int
    tensor_parallel: int
    kv_layout: str = ""

    def digest(self) -> str:
        """Eight hex digits over all fields, each framed by its length."""
        parts = [str(value).encode() for value in self.model_dump().values()]
        return hashlib.sha256(b"".join(len(p).to_bytes(4, "little") + p for p in parts)).hexdigest()[:8]


class ModelCard(Message):
    """What a client must know to make a request that no later stage refuses. `source` is a folder or a hub name."""

    type: Literal["model"] = "model"
    model: str
    source: str
    revision: str = ""
    vocabulary_size: int
    max_model_len_tokens: int
    block_size_tokens: int
    max_logprobs: int = 20


class WorkerCard(Message):
    """One incarnation of one worker. Renewed every second, gone three seconds after the last renewal.

    `state`: only those that are ready get work. A stalled one holds work on which its engine makes no progress, and is about to end.
    """

    type: Literal["worker"] = "worker"
    worker: SafeToken
    incarnation: SafeToken
    role: Role
    state: Literal["ready", "draining", "stalled"] = "ready"
    model: str
    pool: SafeToken
    compatibility: KvCompatibility
    capacity_blocks: int
    capacity_slots: int
    max_model_len_tokens: int
    domain: str = ""
    engine_id: str = ""
    side_channel_host: str = ""
    side_channel_port: int = 0
    peers: list[str] = Field(default=[], description="lanes this worker has finished its NIXL handshake with")
    pid: int = 0
    started_ns: int = 0

    @property
    def lane(self) -> str:
        """`<worker>-<incarnation>`: names this incarnation's queue, so that a revived worker cannot bind to an old one."""
        return f"{self.worker}-{self.incarnation}"


class PrefillTiming(Message):
    """How long this worker's prefills take: `base_s + per_token_s * new tokens`, fitted to those it did."""

    base_s: float = Field(ge=0.0)
    per_token_s: float = Field(ge=0.0)

    def seconds(self, new_tokens: float) -> float:
        return self.base_s + self.per_token_s * new_tokens


class WorkerLoad(Message):
    """On `jw.load.<worker>`. Counters run from the start of the incarnation.

    `fetched_sequence`: everything in the worker's queue up to this stream sequence was fetched. `running_new_tokens`: of the jobs
    in hand, the prompt tokens their routers did not expect in the cache.
    """

    type: Literal["load"] = "load"
    worker: SafeToken
    incarnation: SafeToken
    fetched_requests: int = Field(default=0, description="jobs or handoffs taken from the queue so far")
    finished_requests: int = 0
    running_requests: int = 0
    running_prompt_tokens: int = Field(default=0, description="prompt tokens of the jobs in hand")
    running_new_tokens: int = 0
    fetched_sequence: int = 0
    prefill_timing: PrefillTiming | None = None
    running_prefills: int = Field(default=0, description="jobs in hand that have no first token yet")
    prefill_left_s: float = Field(default=0.0, description="expected until all prefills in hand have their first token")
    used_blocks: int = 0
    wanted_blocks: int = Field(default=0, description="blocks that jobs in hand wait for")
    held_blocks: int = Field(default=0, description="blocks kept for decode workers that have not pulled yet")
    held_handoffs: int = 0
    free_slots: int = 0
    room: int = Field(default=0, description="jobs, or handoffs, that it would take now: what both its slots and its blocks allow")
    kv_silent_s: float = Field(default=0.0, description="seconds since a prefill that changed the cache, told by no KV events; 0 when told")


def pool_name(model_token: str, compatibility: KvCompatibility) -> str:
    """The pool of a model (already subject-safe) on workers that may exchange KV."""
    return f"{model_token}-{compatibility.digest()}"
