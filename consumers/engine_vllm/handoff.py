"""KV references, to and from what vLLM's NIXL connector calls kv_transfer_params.

vLLM trusts these parameters: a block list that does not fit the prompt ends the worker process, and with it every request on the
engine. So a reference is checked here against the prompt and the engine before anything is submitted.
"""

from collections.abc import Mapping
from typing import Any

from ...schemas.blocks import block_count
from ...schemas.decode import KvReference
from ...schemas.errors import HandoffRefused
from ...schemas.tokens import token_count
from ..engine import EngineInfo, Leg

ASK_FOR_HANDOFF: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""Given with a prefill leg: keep the blocks for a peer."""

LARGEST_BLOCK_ID = 2**26
"""Block ids are counts of blocks on one engine; 64 million blocks of 16 tokens are more than any host holds."""


def reference_from(params: Mapping[str, Any], prompt_length: int, block_size: int, cached_tokens: int) -> KvReference:
    """What a finished prefill leg hands on. Blocks beyond the prompt (room for the first token) are not the peer's business."""
    blocks = block_count(prompt_length, block_size)
    return KvReference(
        engine_id=params["remote_engine_id"],
        engine_request_id=params["remote_request_id"],
        host=params["remote_host"],
        port=params["remote_port"],
        block_ids=[list(group)[:blocks] for group in params["remote_block_ids"]],
        block_size_tokens=block_size,
        num_tokens=params["remote_num_tokens"],
        cached_tokens=cached_tokens,
        tensor_parallel=params["tp_size"],
        pipeline_parallel=params["pp_size"],
        context_parallel=params["dcp_size"],
        transfer_mode=params["transfer_mode"],
    )


def pull_params(kv: KvReference) -> dict[str, Any]:
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": kv.engine_id,
        "remote_request_id": kv.engine_request_id,
        "remote_block_ids": kv.block_ids,
        "remote_host": kv.host,
        "remote_port": kv.port,
        "remote_num_tokens": kv.num_tokens,
        "remote_prefill_cached_tokens": kv.cached_tokens,
        "tp_size": kv.tensor_parallel,
        "pp_size": kv.pipeline_parallel,
        "dcp_size": kv.context_parallel,
        "transfer_mode": kv.transfer_mode,
    }


def check(leg: Leg, kv: KvReference, engine: EngineInfo) -> None:
    """Raises HandoffRefused, saying what does not fit."""
    if fault := _fault(token_count(leg.prompt_tokens), kv, engine):
        raise HandoffRefused(f"handoff {kv.engine_request_id}: {fault}")


def _fault(prompt_length: int, kv: KvReference, engine: EngineInfo) -> str:
    expected = block_count(prompt_length, engine.compatibility.block_size_tokens)
    if kv.num_tokens != prompt_length:
        return f"it is for {kv.num_tokens} tokens, the prompt has {prompt_length}"
    if kv.block_size_tokens != engine.compatibility.block_size_tokens:
        return f"its blocks hold {kv.block_size_tokens} tokens, ours {engine.compatibility.block_size_tokens}"
    if len(kv.block_ids) != 1:
        return f"it has {len(kv.block_ids)} groups of blocks, ours 1"
    if [len(group) for group in kv.block_ids] != [expected]:
        return f"it names {kv.held_blocks} blocks, the prompt fills {expected}"
    return _block_fault(kv.block_ids[0]) or _peer_fault(prompt_length, kv, engine)


def _block_fault(blocks: list[int]) -> str:
    if any(not 0 <= block < LARGEST_BLOCK_ID for block in blocks):
        return "it names a block that no engine has"
    if len(set(blocks)) != len(blocks):
        return "it names a block twice"
    return ""


def _peer_fault(prompt_length: int, kv: KvReference, engine: EngineInfo) -> str:
    if kv.engine_id == engine.engine_id:
        return "it comes from this very engine"
    if not kv.engine_id or not kv.engine_request_id or not kv.host:
        return "it does not say where the blocks are"
    if kv.tensor_parallel != engine.compatibility.tensor_parallel or kv.pipeline_parallel != 1 or kv.context_parallel != 1:
        return "it is spread over devices in another way than ours"
    if kv.transfer_mode != "pull":
        return f"its transfer mode is {kv.transfer_mode!r}, ours is pull"
    if kv.cached_tokens > prompt_length:
        return "it claims more cached tokens than the prompt has"
    return ""
