"""A vLLM logits processor that makes a request begin with given tokens.

Reads `jw_forced` (a list of token ids) from the request's `extra_args`. While fewer tokens than that are drawn, only the next one of
the list can be drawn. All else about the request (random state, penalties, grammar, stop checks) sees an ordinary token, so what
follows is what would have followed where these tokens were drawn first.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.logits_processor.interface import BatchUpdate, LogitsProcessor

if TYPE_CHECKING:
    from vllm.config import VllmConfig

FORCED = "jw_forced"


class ForcedTokens(LogitsProcessor):
    """`_forced`: row in the batch -> (tokens to force, the engine's live list of drawn tokens)."""

    def __init__(self, vllm_config: "VllmConfig", device: torch.device, is_pin_memory: bool) -> None:
        self._forced: dict[int, tuple[list[int], Sequence[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._forced, batch_update, _forced_of)
        for row in [row for row, (forced, drawn) in self._forced.items() if len(drawn) >= len(forced)]:
            del self._forced[row]

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, (forced, drawn) in self._forced.items():
            token = forced[len(drawn)]
            own = logits[row, token].clone()
            logits[row] = -torch.inf
            # A token that a mask excludes here was allowed where it was drawn; any finite value draws it.
            logits[row, token] = torch.where(torch.isfinite(own), own, torch.zeros_like(own))
        return logits


def _forced_of(params: SamplingParams, _: list[int] | None, drawn: list[int]) -> tuple[list[int], Sequence[int]] | None:
    forced: list[int] = (params.extra_args or {}).get(FORCED) or []
    return (forced, drawn) if len(drawn) < len(forced) else None
