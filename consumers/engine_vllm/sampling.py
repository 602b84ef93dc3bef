"""A leg's sampling as vLLM's SamplingParams.

Everything vLLM may read beyond the schema's own fields is made here: a client can neither name KV blocks of ours nor force tokens.
"""

import json
from typing import Any

from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

from ...schemas.requests import Sampling, StructuredOutput
from .forced_tokens import FORCED


def for_answer(sampling: Sampling, forced: list[int], kv_transfer_params: dict[str, Any] | None) -> SamplingParams:
    """The client's sampling unchanged."""
    extra: dict[str, Any] = {}
    if kv_transfer_params is not None:
        extra["kv_transfer_params"] = kv_transfer_params
    if forced:
        extra[FORCED] = forced
    return SamplingParams(
        **_drawing(sampling),
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop=sampling.stop or None,
        # Text is needed here only to end early at a stop string; whoever asked makes the text.
        detokenize=bool(sampling.stop),
        skip_special_tokens=sampling.skip_special_tokens,
        include_stop_str_in_output=sampling.include_stop_str_in_output,
        output_kind=RequestOutputKind.DELTA,
        extra_args=extra or None,
    )


def for_first_token(sampling: Sampling, forced: list[int], kv_transfer_params: dict[str, Any]) -> SamplingParams:
    """One token, drawn as the whole answer's first: an end-of-sequence or stop token ends the leg as it would end the answer.

    A minimum length of more than one token masks those tokens here as well. A stop string is left to the decode leg, whose first
    token is forced to be this one.
    """
    extra: dict[str, Any] = {"kv_transfer_params": kv_transfer_params}
    if forced:
        extra[FORCED] = forced[:1]
    return SamplingParams(
        **_drawing(sampling),
        max_tokens=1,
        min_tokens=min(sampling.min_tokens, 1),
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args=extra,
    )


def reasoning(sampling: Sampling) -> dict[str, Any]:
    """What tells the grammar where the thinking ends and the answer begins: arguments of vLLM's `generate`."""
    wanted = sampling.structured_output
    if wanted is None:
        return {}
    options = json.loads(wanted.reasoning_options) if wanted.reasoning_options else None
    return {"reasoning_ended": wanted.reasoning_ended, "reasoning_parser_kwargs": options}


def _drawing(sampling: Sampling) -> dict[str, Any]:
    """What decides which token is drawn, and which tokens end the answer: the same on both legs."""
    return {
        "n": 1,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "seed": sampling.seed,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "logprobs": sampling.logprobs,
        "logit_bias": {int(token): bias for token, bias in sampling.logit_bias.items()} or None,
        "allowed_token_ids": sampling.allowed_token_ids or None,
        "bad_words": sampling.bad_words or None,
        "stop_token_ids": sampling.stop_token_ids or None,
        "ignore_eos": sampling.ignore_eos,
        "structured_outputs": _structured(sampling.structured_output),
    }


def _structured(wanted: StructuredOutput | None) -> StructuredOutputsParams | None:
    if wanted is None:
        return None
    if wanted.kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if wanted.kind == "choice":
        return StructuredOutputsParams(choice=wanted.value.split("\n"))
    named: dict[str, Any] = {wanted.kind: wanted.value}
    return StructuredOutputsParams(**named)
