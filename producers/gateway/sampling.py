"""From vLLM's SamplingParams, as its front end made them, to the sampling of our requests. Imports vLLM.

What the queue or the workers cannot honour is refused by name; nothing is dropped in silence.
"""

import json
from typing import Any, cast

from pydantic import ValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from ...schemas.codec import first_complaint
from ...schemas.errors import InvalidRequest
from ...schemas.requests import Sampling, StructuredOutput

_NOT_SERVED: dict[str, Any] = {
    # field of SamplingParams: the value that asks for nothing
    "prompt_logprobs": None,
    "prompt_logprob_token_ids": None,
    "logprob_token_ids": None,
    "thinking_token_budget": None,
    "repetition_detection": None,
    "routed_experts_prompt_start": 0,
    "trace_decode_token_ids": None,
    "extra_args": None,
}


class NotServedField(InvalidRequest):
    """`param`: the field that asks for what is not served."""

    def __init__(self, param: str, hint: str = "leave it out") -> None:
        super().__init__(f"{param} is not served here: {hint}")
        self.param = param


def sampling_of(
    params: SamplingParams, seed: int | None, reasoning_ended: bool | None, reasoning_options: dict[str, Any] | None
) -> Sampling:
    """`params` have been through vLLM's own checks. Raises InvalidRequest naming the field."""
    _refuse_what_is_not_served(params)
    structured = params.structured_outputs
    try:
        return Sampling(
            max_tokens=params.max_tokens or 1,
            min_tokens=params.min_tokens,
            temperature=float(params.temperature),
            top_p=float(params.top_p),
            top_k=params.top_k,
            min_p=float(params.min_p),
            seed=seed,
            stop=_texts(params.stop),
            stop_token_ids=list(params.stop_token_ids or ()),
            ignore_eos=params.ignore_eos,
            presence_penalty=float(params.presence_penalty),
            frequency_penalty=float(params.frequency_penalty),
            repetition_penalty=float(params.repetition_penalty),
            logprobs=params.logprobs,
            logit_bias={str(token): float(bias) for token, bias in (params.logit_bias or {}).items()},
            allowed_token_ids=list(params.allowed_token_ids or ()),
            bad_words=list(params.bad_words or ()),
            structured_output=structured_output_of(structured, reasoning_ended, reasoning_options) if structured is not None else None,
            skip_special_tokens=params.skip_special_tokens,
            include_stop_str_in_output=params.include_stop_str_in_output,
        )
    except ValidationError as error:
        raise InvalidRequest(first_complaint(error)) from error


def structured_output_of(
    wanted: StructuredOutputsParams, reasoning_ended: bool | None, reasoning_options: dict[str, Any] | None
) -> StructuredOutput | None:
    for name in ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"):
        if getattr(wanted, name):
            raise NotServedField(f"structured_outputs.{name}")
    options = json.dumps(reasoning_options) if reasoning_options else ""

    def constraint(kind: Any, value: str = "") -> StructuredOutput:
        return StructuredOutput(kind=kind, value=value, reasoning_ended=reasoning_ended, reasoning_options=options)

    schema = cast(Any, wanted).json
    if schema is not None:
        return constraint("json", schema if isinstance(schema, str) else json.dumps(schema))
    if wanted.json_object:
        return constraint("json_object")
    if wanted.choice is not None:
        if any("\n" in choice for choice in wanted.choice):
            raise InvalidRequest("structured_outputs.choice cannot have line breaks: use a regex")
        return constraint("choice", "\n".join(wanted.choice))
    for kind in ("regex", "grammar", "structural_tag"):
        value = getattr(wanted, kind)
        if value is not None:
            return constraint(kind, value)
    return None


def _refuse_what_is_not_served(params: SamplingParams) -> None:
    for name, nothing in _NOT_SERVED.items():
        value = getattr(params, name)
        if value is nothing or value == nothing or (name == "extra_args" and set(value) <= {"session_id"}):
            continue
        raise NotServedField(name)
    if params.logprobs is not None and params.logprobs < 0:
        raise NotServedField("logprobs of the whole vocabulary", "ask for at most 20")


def _texts(given: str | list[str] | None) -> list[str]:
    if given is None:
        return []
    return [given] if isinstance(given, str) else list(given)
