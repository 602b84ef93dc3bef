"""Every refusal names the limit."""

import pytest

from jetwake.producers.admission import admit
from jetwake.schemas.errors import InvalidRequest, PromptTooLong
from jetwake.schemas.requests import InferenceRequest, Sampling
from jetwake.schemas.tokens import pack_tokens
from jetwake.schemas.workers import ModelCard

MODEL = ModelCard(model="m", source="", vocabulary_size=1000, max_model_len_tokens=100, block_size_tokens=16, max_logprobs=5)


def request(prompt: list[int], **sampling: object) -> InferenceRequest:
    return InferenceRequest(
        request_id="r",
        gateway="g",
        model="m",
        prompt_tokens=pack_tokens(prompt),
        sampling=Sampling.model_validate({"max_tokens": 10, **sampling}),
    )


def test_what_fits_exactly_is_admitted() -> None:
    admit(request([1] * 90), MODEL)


@pytest.mark.parametrize(
    ("bad", "error", "words"),
    [
        (request([]), InvalidRequest, "empty"),
        (request([1] * 100), PromptTooLong, "100 tokens.*at most 100"),
        (request([1] * 91), PromptTooLong, "max_tokens can be 9"),
        (request([1, 1000]), InvalidRequest, "token id 1000.*vocabulary of 1000"),
        (request([1], min_tokens=11), InvalidRequest, "min_tokens.*11.*10"),
        (request([1], logprobs=6), InvalidRequest, "logprobs is 6.*at most 5"),
        (request([1], stop_token_ids=[-1]), InvalidRequest, "stop_token_ids has token id -1"),
        (request([1], logit_bias={"x": 1.0}), InvalidRequest, "'x'"),
        (request([1], logit_bias={"1000": 1.0}), InvalidRequest, "logit_bias has token id 1000"),
        (request([1]).model_copy(update={"prompt_tokens": b"abc"}), InvalidRequest, "3 bytes"),
    ],
)
def test_refusals(bad: InferenceRequest, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        admit(bad, MODEL)
