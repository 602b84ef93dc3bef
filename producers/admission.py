"""What no later stage would accept is refused here, by the first who can know: the client before it sends, the router for everyone."""

from ..schemas.errors import InvalidRequest, PromptTooLong
from ..schemas.requests import InferenceRequest
from ..schemas.tokens import largest_token
from ..schemas.workers import ModelCard


def admit(request: InferenceRequest, model: ModelCard) -> None:
    """Raises InvalidRequest or PromptTooLong, with the limit in the text. Pure."""
    if len(request.prompt_tokens) % 4:
        raise InvalidRequest(f"prompt_tokens has {len(request.prompt_tokens)} bytes, not a multiple of 4")
    prompt, sampling, limit = request.prompt_length_tokens, request.sampling, model.max_model_len_tokens
    if prompt == 0:
        raise InvalidRequest("the prompt is empty: at least one token is needed")
    if prompt >= limit:
        raise PromptTooLong(f"the prompt has {prompt} tokens; {model.model} takes at most {limit} tokens, prompt and answer together")
    if prompt + sampling.max_tokens > limit:
        raise PromptTooLong(
            f"the prompt has {prompt} tokens and max_tokens is {sampling.max_tokens}; "
            f"{model.model} takes at most {limit} tokens, prompt and answer together: max_tokens can be {limit - prompt}"
        )
    if sampling.min_tokens > sampling.max_tokens:
        raise InvalidRequest(f"min_tokens ({sampling.min_tokens}) is over max_tokens ({sampling.max_tokens})")
    if sampling.logprobs is not None and sampling.logprobs > model.max_logprobs:
        raise InvalidRequest(f"logprobs is {sampling.logprobs}; {model.model} gives at most {model.max_logprobs}")
    _check_token_ids(request, model)


def _check_token_ids(request: InferenceRequest, model: ModelCard) -> None:
    highest = largest_token(request.prompt_tokens)
    if highest >= model.vocabulary_size:
        raise InvalidRequest(f"the prompt has token id {highest}; {model.model} has a vocabulary of {model.vocabulary_size}")
    named = {
        "stop_token_ids": request.sampling.stop_token_ids,
        "allowed_token_ids": request.sampling.allowed_token_ids,
        "logit_bias": [_token_id(key) for key in request.sampling.logit_bias],
    }
    for field, token_ids in named.items():
        for token_id in token_ids:
            if not 0 <= token_id < model.vocabulary_size:
                raise InvalidRequest(f"{field} has token id {token_id}; {model.model} has a vocabulary of {model.vocabulary_size}")


def _token_id(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InvalidRequest(f"logit_bias has the key {text!r}, which is no token id") from None
