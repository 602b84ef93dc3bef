"""What a simulated engine is told, and what follows from it: its limits and its compatibility with others."""

import importlib.metadata

from pydantic import BaseModel, ConfigDict, Field, SkipValidation

from ..schemas.workers import KvCompatibility, ModelCard
from .simulated_model import Limits
from .timing import ZERO, Timing


class SimulatedShape(BaseModel):
    """All but its pace. Engines that exchange KV need equal model, block size and block bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    model: str = Field(default="simulated", min_length=1)
    tokenizer: str = Field(default="", description="folder or hub name of one, to see words; empty: clients see token numbers")
    served_name: str = Field(default="", description="what clients call it; empty: the name of the model")
    vocabulary_size: int = Field(default=32_000, ge=2, description="tokens that there are")
    max_model_len_tokens: int = Field(default=32_768, ge=2, description="of a prompt and its answer together")
    eos_token_id: int | None = Field(default=None, ge=0, description="the token that ends an answer; None: only max_tokens does")
    seed: int = Field(default=0, description="another seed is another model, wherever the temperature is above 0")
    block_size_tokens: int = Field(default=16, ge=1, description="of one KV block; must be equal in a pool")
    num_blocks: int = Field(default=4096, ge=1, description="KV blocks of the engine")
    block_bytes: int = Field(default=512, ge=8, multiple_of=8, description="of one KV block, moved by NIXL")
    slots: int = Field(default=256, ge=1, description="requests that run at the same time; more wait")
    lease_s: float = Field(default=30.0, gt=0.0, description="how long prefilled blocks wait for a peer unless extended")
    room_timeout_s: float = Field(default=60.0, gt=0.0, description="how long a request may wait for free blocks")
    pull_timeout_s: float = Field(default=20.0, gt=0.0, description="how long a KV cache may take to be pulled")
    handshake_timeout_s: float = Field(default=5.0, gt=0.0, description="with a peer, for the first pull from it")
    side_channel_host: str = Field(default="127.0.0.1", description="address that peers use for the handshake")
    side_channel_port: int = Field(default=0, ge=0, le=65535, description="0: any free port")
    nixl_progress_delay_us: int = Field(default=100, ge=0, description="0 saves the last microseconds and burns a core for each engine")
    dies_on_token: int | None = Field(default=None, description="a prompt with this token kills the engine, as a killer request does")
    stalls_on_token: int | None = Field(default=None, description="a prompt with this token makes the engine stand still")
    pulls_fail: bool = Field(default=False, description="every pull of this engine fails, as where the network between engines is broken")
    record_block_events: bool = Field(default=True, description="keep what was cached and evicted until it is taken")


class SimulatedSettings(SimulatedShape):
    """One simulated engine."""

    timing: SkipValidation[Timing] = ZERO

    @property
    def name(self) -> str:
        return self.served_name or self.model

    def limits(self) -> Limits:
        return Limits(
            model=self.name,
            vocabulary_size=self.vocabulary_size,
            max_model_len_tokens=self.max_model_len_tokens,
            block_size_tokens=self.block_size_tokens,
            eos_token_id=self.eos_token_id,
            seed=self.seed,
            writes_numbers=not self.tokenizer,
        )

    def model_card(self) -> ModelCard:
        return ModelCard(
            model=self.name,
            source=self.tokenizer,
            vocabulary_size=self.vocabulary_size,
            max_model_len_tokens=self.max_model_len_tokens,
            block_size_tokens=self.block_size_tokens,
        )

    def compatibility(self) -> KvCompatibility:
        return KvCompatibility(
            engine="simulated",
            engine_version=importlib.metadata.version("jetwake"),
            nixl_version=importlib.metadata.version("nixl"),
            model=self.name,
            revision="",
            dtype="fingerprint",
            kv_dtype="uint64",
            block_size_tokens=self.block_size_tokens,
            tensor_parallel=1,
            kv_layout=f"{self.block_bytes} bytes",
        )
