"""The engine contract: what a prefill, decode or aggregated worker asks of the thing that runs the model.

Two implementations keep it: `engine_vllm` and `engine_simulated`; one conformance suite (`tests/engines`) holds both to it.

The life of an engine:

1. `start()`   loads and warms everything; the engine is *ready* when it returns. A failed start leaves nothing behind.
2. `greet()`   finishes the first handshake with a peer, so that no request pays for it. A peer that is gone: raises PullFailed
               within `handshake_timeout_s`; the engine itself is unharmed.
3. `prefill()`, `generate()`, `held()`, `extend()`, `release()`  are the work, any number at once.
4. `drain()`   returns when no leg runs and no block is held for a peer. New legs are the caller's to stop.
5. `stop()`    ends everything at once; also after a failed start, and twice is safe. No process or memory is left.

When the other side dies: a `generate()` that is pulling from a dead peer raises PullFailed (never a wrong token, never a hang
beyond `pull_timeout_s`); blocks held for a dead peer are freed when their lease ends or `release()` is called; when the engine's
own processes die, every call in hand and every later one raises EngineDead.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from ..schemas.decode import KvReference
from ..schemas.replies import PositionLogprobs
from ..schemas.requests import Sampling
from ..schemas.workers import KvCompatibility, ModelCard

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class EngineInfo:
    """Fixed facts of a started engine. `engine_id` names it towards NIXL peers and is new with every start."""

    engine_id: str
    model: ModelCard
    compatibility: KvCompatibility
    capacity_blocks: int
    capacity_slots: int
    kv_bytes_per_block: int
    side_channel_host: str
    side_channel_port: int


@dataclass(frozen=True)
class Peer:
    """Another engine, as its worker card tells of it."""

    engine_id: str
    host: str
    port: int
    tensor_parallel: int = 1


@dataclass(frozen=True)
class Leg:
    """One request as an engine sees it.

    `engine_request_id` is unique for each leg of each attempt. `forced_tokens` (little-endian unsigned 32-bit ids) are output
    tokens already given to the client: the engine emits exactly these first, and its sampling state (seed, penalties, grammar,
    stop checks) afterwards is as if it had drawn them. `kv`: pull the prompt's cache from there; None: compute it here.
    """

    engine_request_id: str
    prompt_tokens: bytes
    sampling: Sampling
    lora: str = ""
    cache_salt: str = ""
    forced_tokens: bytes = b""
    kv: KvReference | None = None


@dataclass(frozen=True)
class Prefilled:
    """The outcome of a prefill leg: its first token, and where its cache waits.

    `finish_reason` is set when the answer is complete with that token (end of sequence, a stop token, max_tokens 1); then
    `kv` is None and nothing is held.
    """

    first_tokens: bytes
    kv: KvReference | None
    cached_tokens: int
    logprobs: Sequence[PositionLogprobs] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str = ""


@dataclass(frozen=True)
class EngineOutput:
    """New tokens since the last output (forced ones included, so the first output starts at offset 0).

    The last output has `finish_reason`. `cached_tokens` counts prompt tokens that the side which *prefilled* took from its cache;
    `kv_bytes` the bytes pulled through NIXL for this leg, `transfer_s` how long NIXL says that took, `pulled_monotonic_ns` when they were
    there, by this machine's monotonic clock (0: not seen). All are final in the last output.
    """

    tokens: bytes
    logprobs: Sequence[PositionLogprobs] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str = ""
    cached_tokens: int = 0
    kv_bytes: int = 0
    transfer_s: float = 0.0
    pulled_monotonic_ns: int = 0


@dataclass(frozen=True)
class Held:
    """Blocks a prefill engine keeps for a peer that has not pulled them yet."""

    blocks: int
    lease_remaining_s: float


@dataclass(frozen=True)
class BlockChange:
    """Blocks that came into the prefix cache, or left it, together. Hashes are Jetwake's own (`schemas.blocks`)."""

    kind: Literal["stored", "removed", "cleared"]
    hashes: Sequence[int] = ()


@dataclass(frozen=True)
class EngineStats:
    """Now: requests in the engine, blocks in use (held ones included), seconds since the last step made progress."""

    running_requests: int = 0
    waiting_requests: int = 0
    used_blocks: int = 0
    capacity_blocks: int = 0
    last_step_age_s: float = 0.0
    counters: Mapping[str, int] = field(default_factory=dict[str, int])


class Engine(Protocol):
    """See the module's docstring for the order of calls and what each promises when the other side dies."""

    async def start(self) -> EngineInfo:
        """Ready on return. Raises SetupError (an option, the model or the installation is wrong) or EngineDead."""
        ...

    async def greet(self, peer: Peer) -> None:
        """Finish the handshake with a peer. Greeting a known peer again is cheap. Raises PullFailed."""
        ...

    async def forget(self, engine_id: str) -> None:
        """Drop all transfer state about a peer that is gone. Unknown peers are ignored."""
        ...

    async def prefill(self, leg: Leg) -> Prefilled:
        """Compute the prompt's KV cache and draw the first token as the whole answer would begin.

        Cancelling the call aborts the leg and frees its blocks. Raises EngineRefused, EngineDead.
        """
        ...

    def generate(self, leg: Leg) -> AsyncGenerator[EngineOutput, None]:
        """Generate the answer, with the cache pulled from `leg.kv` or computed here.

        Closing the iterator (or cancelling its task) aborts the leg; its blocks are freed once no transfer can write to them.
        Raises HandoffRefused (before anything is touched), PullFailed (no token was given), EngineRefused, EngineDead.
        """
        ...

    async def held(self) -> Mapping[str, Held]:
        """By engine request id: what is kept for peers. Empty on an engine that never prefilled for others. Raises EngineDead."""
        ...

    async def extend(self, engine_request_ids: Sequence[str], lease_s: float) -> None:
        """Let these leases end no earlier than `lease_s` from now. Ids no longer held are ignored. Raises EngineDead."""
        ...

    async def release(self, engine_request_ids: Sequence[str]) -> None:
        """Free the blocks kept for these. Ids no longer held are ignored. Raises EngineDead."""
        ...

    async def block_changes(self) -> Sequence[BlockChange]:
        """Waits for the prefix cache to change, and returns what changed since the last call, in order. For one reader.

        Where changes were lost, what follows begins with `cleared` and tells of everything known to be cached. Raises EngineDead.
        """
        ...

    def stats(self) -> EngineStats: ...

    async def ping(self, timeout_s: float) -> None:
        """Returns when every process of the engine answered. Raises EngineDead when one did not."""
        ...

    async def drain(self) -> None:
        """Returns when no leg runs and nothing is held."""
        ...

    async def stop(self) -> None:
        """Nothing of the engine is left on return."""
        ...
