"""Read by decode workers: the handoff from `jw.handoff.<pool>`, which says where a request's KV cache waits to be pulled."""

from typing import Literal

from pydantic import Field

from .codec import Message
from .replies import PositionLogprobs
from .requests import InferenceRequest, SafeToken, TokenBytes


class KvReference(Message):
    """Where the KV blocks of one prompt are, for one single pull through NIXL.

    `block_ids` has one list per KV cache group, in prompt order. `engine_request_id` is the *prefill engine's* name for the
    request: the one a release must carry.
    """

    engine_id: str
    engine_request_id: str
    host: str
    port: int = Field(ge=1, le=65535)
    block_ids: list[list[int]]
    block_size_tokens: int = Field(ge=1)
    num_tokens: int = Field(ge=1)
    cached_tokens: int = Field(ge=0, description="prompt tokens the prefill engine took from its own cache")
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    context_parallel: int = 1
    transfer_mode: str = "pull"

    @property
    def held_blocks(self) -> int:
        return sum(len(group) for group in self.block_ids)


class KvHandoff(Message):
    """The prompt is prefilled. `first_tokens` were sent: the first one, or all that earlier attempts gave.

    `hold_until_ns` (server time): the prefill worker keeps the lease alive till then.
    """

    type: Literal["kv_handoff"] = "kv_handoff"
    request: InferenceRequest
    kv: KvReference
    prefill_worker: SafeToken
    prefill_incarnation: SafeToken
    first_tokens: TokenBytes
    first_logprobs: list[PositionLogprobs] = []
    predicted_cached_tokens: int = Field(default=0, ge=0)
    hold_until_ns: int
