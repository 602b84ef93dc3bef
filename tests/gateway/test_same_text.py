"""What is done to be fast changes no token and no text: against vLLM's and transformers' own ways, for whatever people write."""

from collections.abc import Iterator
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetwake.deploy.demo_model import fetch
from jetwake.producers.gateway import fast_tokenizer
from jetwake.producers.gateway.fast_tokenizer import SAMPLES, use_fast_tokenizer

pytest.importorskip("vllm")
fastokens: Any = pytest.importorskip("fastokens")
pytestmark = pytest.mark.vllm

SPECIAL = ["<|im_start|>", "<|im_end|>", "<s>", "</s>", "<|user|>", "<|assistant|>"]
WRITTEN = st.lists(st.one_of(st.sampled_from([*SAMPLES, *SPECIAL, " ", "\n\n", "'s", "0123"]), st.text(max_size=20)), max_size=12).map(
    "".join
)
_TOKENIZERS: dict[str, tuple[Any, Any]] = {}


@pytest.fixture(scope="module", autouse=True)
def tokenizers() -> Iterator[None]:
    """`tiny`, plain and fast."""
    from vllm.tokenizers import get_tokenizer

    folder = str(fetch("tiny"))
    fastokens.unpatch_transformers()
    plain = get_tokenizer(folder)
    assert use_fast_tokenizer(folder)
    _TOKENIZERS["tiny"] = plain, get_tokenizer(folder)
    yield
    fastokens.unpatch_transformers()


@given(WRITTEN, st.booleans())
@settings(deadline=None, max_examples=300)
def test_the_fast_tokenizer_gives_the_same_tokens(text: str, with_specials: bool) -> None:
    plain, fast = _TOKENIZERS["tiny"]
    assert type(plain._tokenizer) is not type(fast._tokenizer)
    tokens = plain(text, add_special_tokens=with_specials).input_ids
    assert fast(text, add_special_tokens=with_specials).input_ids == tokens
    assert fast.decode(tokens) == plain.decode(tokens)


def test_a_tokenizer_that_the_fast_one_gets_wrong_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.tokenizers import get_tokenizer

    folder = str(fetch("tiny"))
    wrong = iter(range(10**6))  # no two encodings are alike
    monkeypatch.setattr(fast_tokenizer, "_encoded", lambda *_: next(wrong))
    assert not use_fast_tokenizer(folder)
    assert type(cast(Any, get_tokenizer(folder))._tokenizer) is type(_TOKENIZERS["tiny"][0]._tokenizer)


@given(st.text(max_size=80), st.lists(st.integers(0, 2047), min_size=1, max_size=30), st.booleans(), st.booleans())
@settings(deadline=None, max_examples=200)
def test_an_answer_reads_the_same_when_less_of_the_prompt_is_looked_at(text: str, drawn: list[int], skip: bool, fast: bool) -> None:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
    from vllm.v1.engine.output_processor import OutputProcessor

    from jetwake.producers.gateway.stream_start import look_back_less

    tokenizer = _TOKENIZERS["tiny"][fast]
    prompt = tokenizer("a longer beginning of it all " * 10 + text).input_ids

    def answer(short: bool) -> str:
        processor = OutputProcessor(tokenizer, log_stats=False)
        params = SamplingParams(max_tokens=100, skip_special_tokens=skip)
        core = EngineCoreRequest(
            request_id="r",
            prompt_token_ids=prompt,
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        core.external_req_id = "r"
        processor.add_request(core, text, None, 0, None)
        if short:
            look_back_less(processor, core)
        made = processor.process_outputs([EngineCoreOutput(request_id="r", new_token_ids=drawn)]).request_outputs
        return "".join(out.outputs[0].text for out in made)  # type: ignore[union-attr]

    assert answer(short=True) == answer(short=False)
