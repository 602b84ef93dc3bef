"""What an attempt that continues another one gives, on real vLLM engines: after k tokens that were given, the rest of the same answer.

As after a dead decode worker: the prefill engine is made to draw the first of the given tokens, the decode engine pulls the cache and
is made to draw all of them. The reference is the decode engine alone, undisturbed.
"""

import json

import pytest

from jetwake.schemas.replies import PositionLogprobs
from jetwake.schemas.requests import Sampling, StructuredOutput
from jetwake.schemas.tokens import pack_tokens, unpack_tokens

from .conformance import Answer, Pair, alone, collect, handoff_of, leg
from .test_vllm_equality import SCHEMA, SEEDED, text_of
from .vllm_engines import pair, tiny_model, vllm_pair  # noqa: F401  (fixtures)

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

VARIANTS = {
    "greedy": SEEDED.model_copy(update={"temperature": 0.0}),
    "seeded": SEEDED,
    "penalties": SEEDED.model_copy(update={"frequency_penalty": 1.5, "presence_penalty": 0.5, "repetition_penalty": 1.3}),
    "min-tokens": SEEDED.model_copy(update={"ignore_eos": False, "min_tokens": 30}),
    "json": SEEDED.model_copy(update={"max_tokens": 120, "structured_output": StructuredOutput(kind="json", value=json.dumps(SCHEMA))}),
    "regex": SEEDED.model_copy(update={"structured_output": StructuredOutput(kind="regex", value="[a-f]{20,30}[0-9]")}),
    "logprobs": SEEDED.model_copy(update={"logprobs": 3}),
}


async def continued(pair: Pair, prompt: bytes, sampling: Sampling, given: list[int]) -> tuple[Answer, list[PositionLogprobs]]:  # noqa: F811
    """The answer of the next attempt, over both engines."""
    first, kv = await handoff_of(pair, leg(prompt, sampling, pack_tokens(given[:1])))
    assert unpack_tokens(first.first_tokens) == given[:1]
    outputs = [output async for output in pair.decode.generate(leg(prompt, sampling, pack_tokens(given), kv))]
    tokens = [token for output in outputs for token in unpack_tokens(output.tokens)]
    logprobs = [entry for output in outputs for entry in output.logprobs]
    return Answer(tokens, outputs[-1].finish_reason, outputs[-1].stop_reason, len(logprobs), outputs[-1]), logprobs


@pytest.mark.parametrize("name", VARIANTS)
async def test_the_rest_is_that_of_the_undisturbed_answer(pair: Pair, name: str) -> None:  # noqa: F811
    prompt, sampling = pair.prompt(75, salt=21), VARIANTS[name]
    expected = await alone(pair, prompt, sampling)
    for cut in (1, 2, len(expected.tokens) // 3, len(expected.tokens) // 2, len(expected.tokens) - 1, len(expected.tokens)):
        answer, _ = await continued(pair, prompt, sampling, expected.tokens[:cut])
        assert (answer.tokens, answer.finish_reason, answer.stop_reason) == (
            expected.tokens,
            expected.finish_reason,
            expected.stop_reason,
        ), cut


async def test_log_probabilities_of_given_tokens_come_again(pair: Pair) -> None:  # noqa: F811
    prompt, sampling = pair.prompt(75, salt=22), VARIANTS["logprobs"]
    await pair.forget_prefixes()
    outputs = [output async for output in pair.decode.generate(leg(prompt, sampling))]
    expected = [entry for output in outputs for entry in output.logprobs]
    _, again = await continued(pair, prompt, sampling, [entry.token_ids[0] for entry in expected[:25]])
    assert [(entry.token_ids, entry.ranks) for entry in again] == [(entry.token_ids, entry.ranks) for entry in expected]
    for ours, theirs in zip(again, expected, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-3)


async def test_a_stop_string_that_straddles_the_cut(pair: Pair) -> None:  # noqa: F811
    """Part of it was given by the attempt that died; the next one still ends at it."""
    prompt = pair.prompt(60, salt=23)
    tokens = (await alone(pair, prompt, SEEDED)).tokens
    model = pair.decode_info.model.source
    cut = next(at for at in range(5, 30) if text_of(tokens[:at], model).isascii() and len(text_of(tokens[: at + 1], model)) > at)
    before = text_of(tokens[:cut], model)
    stop = before[-2:] + text_of(tokens[: cut + 2], model)[len(before) :][:2]
    sampling = SEEDED.model_copy(update={"stop": [stop]})
    expected = await alone(pair, prompt, sampling)
    answer, _ = await continued(pair, prompt, sampling, expected.tokens[: min(cut, len(expected.tokens) - 1)])
    assert (answer.tokens, answer.finish_reason, answer.stop_reason) == (expected.tokens, "stop", stop)


async def test_unseeded_tokens_are_repeated_whatever_would_be_drawn(pair: Pair) -> None:  # noqa: F811
    sampling = SEEDED.model_copy(update={"seed": None})
    prompt = pair.prompt(60, salt=24)
    given = (await collect(pair.decode, leg(prompt, sampling))).tokens[:20]
    for _ in range(3):
        answer, _ = await continued(pair, prompt, sampling, given)
        assert answer.tokens[:20] == given
        assert len(answer.tokens) == sampling.max_tokens
