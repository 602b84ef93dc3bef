"""What comes out of a prefill and a decode engine is what one engine gives, token for token, on real vLLM engines.

The reference runs on the decode engine alone with nothing cached. The tiny model's margins are wide, so equality is exact; where
batching changes the order of sums, like is compared with like.
"""

import asyncio
import json
import time
from dataclasses import replace

import pytest
from tokenizers import Tokenizer

from jetwake.consumers.engine_vllm.engine import VllmEngine
from jetwake.schemas.errors import EngineRefused, HandoffRefused
from jetwake.schemas.replies import PositionLogprobs
from jetwake.schemas.requests import Sampling, StructuredOutput
from jetwake.schemas.tokens import pack_tokens, unpack_tokens

from .conformance import GREEDY, Pair, alone, apart, collect, handoff, leg, nothing_used
from .vllm_engines import pair, tiny_model, vllm_pair  # noqa: F401  (fixtures)

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

EOS = 2
SEEDED = Sampling(max_tokens=40, temperature=1.0, seed=11, ignore_eos=True)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yy"]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
VARIANTS = {
    "greedy": GREEDY.model_copy(update={"max_tokens": 40}),
    "seeded": SEEDED,
    "nucleus": SEEDED.model_copy(update={"top_p": 0.8, "top_k": 50, "min_p": 0.01}),
    "frequency": SEEDED.model_copy(update={"frequency_penalty": 1.5, "presence_penalty": 0.5}),
    "repetition": SEEDED.model_copy(update={"temperature": 0.0, "repetition_penalty": 1.7}),
    "min-tokens": SEEDED.model_copy(update={"ignore_eos": False, "min_tokens": 12}),
    "bias": SEEDED.model_copy(update={"logit_bias": {"700": 8.0, "701": -100.0}}),
    "allowed": SEEDED.model_copy(update={"allowed_token_ids": list(range(400, 460))}),
    "bad-words": SEEDED.model_copy(update={"bad_words": ["e", "the"]}),
    "json": SEEDED.model_copy(update={"max_tokens": 120, "structured_output": StructuredOutput(kind="json", value=json.dumps(SCHEMA))}),
    "choice": SEEDED.model_copy(update={"structured_output": StructuredOutput(kind="choice", value="yes\nno\nperhaps")}),
    "regex": SEEDED.model_copy(update={"structured_output": StructuredOutput(kind="regex", value="[a-f]{3,9}[0-9]")}),
}


def text_of(tokens: list[int], model: str) -> str:
    return str(Tokenizer.from_file(f"{model}/tokenizer.json").decode(tokens))


@pytest.mark.parametrize("length", [1, 31, 32, 33, 1023, 1024, 3000, 6000])
async def test_lengths(pair: Pair, length: int) -> None:  # noqa: F811
    prompt = pair.prompt(length, salt=length)
    expected = await alone(pair, prompt, VARIANTS["greedy"])
    answer = await apart(pair, prompt, VARIANTS["greedy"])
    assert answer.tokens == expected.tokens
    blocks = -(-length // pair.block)
    assert answer.last.kv_bytes == blocks * pair.decode_info.kv_bytes_per_block


@pytest.mark.parametrize("name", VARIANTS)
async def test_options(pair: Pair, name: str) -> None:  # noqa: F811
    prompt, sampling = pair.prompt(90, salt=5), VARIANTS[name]
    expected = await alone(pair, prompt, sampling)
    answer = await apart(pair, prompt, sampling)
    assert (answer.tokens, answer.finish_reason, answer.stop_reason) == (expected.tokens, expected.finish_reason, expected.stop_reason)
    for cut in (3, len(expected.tokens) - 1):
        replayed = await collect(pair.decode, leg(prompt, sampling, pack_tokens(expected.tokens[:cut])))
        assert (replayed.tokens, replayed.finish_reason) == (expected.tokens, expected.finish_reason)


async def test_json_is_valid(pair: Pair) -> None:  # noqa: F811
    """A random model would put blanks between the parts for ever, so they are made unlikely."""
    vocabulary = Tokenizer.from_file(f"{pair.decode_info.model.source}/tokenizer.json").get_vocab()
    blanks = {str(token): -100.0 for text, token in vocabulary.items() if set(text) & set(" \n\tĠĊĉč")}
    answer = await apart(pair, pair.prompt(50, salt=6), VARIANTS["json"].model_copy(update={"logit_bias": blanks, "ignore_eos": False}))
    assert answer.finish_reason == "stop"
    document = json.loads(text_of([token for token in answer.tokens if token != EOS], pair.decode_info.model.source))
    assert set(document) == {"a", "b"}


async def test_stop_string(pair: Pair) -> None:  # noqa: F811
    """Also one that begins in the first token, which another engine drew."""
    prompt = pair.prompt(60, salt=7)
    tokens = (await alone(pair, prompt, SEEDED)).tokens
    text = text_of(tokens, pair.decode_info.model.source)
    for stop in (text[:2], text[1:4], text[12:15]):
        sampling = SEEDED.model_copy(update={"stop": [stop]})
        expected = await alone(pair, prompt, sampling)
        answer = await apart(pair, prompt, sampling)
        assert (answer.tokens, answer.finish_reason, answer.stop_reason) == (expected.tokens, "stop", stop)


async def test_first_token_ends_the_answer(pair: Pair) -> None:  # noqa: F811
    """An end-of-sequence token, drawn first because nothing else may be: nothing is held, and no decode leg is needed."""
    sampling = Sampling(max_tokens=20, temperature=0.0, allowed_token_ids=[EOS])
    expected = await alone(pair, pair.prompt(70, salt=8), sampling)
    first = await pair.prefill.prefill(leg(pair.prompt(70, salt=8), sampling))
    assert (unpack_tokens(first.first_tokens), first.finish_reason, first.kv) == ([EOS], "stop", None)
    assert (expected.tokens, expected.finish_reason, expected.stop_reason) == ([EOS], first.finish_reason, first.stop_reason)
    assert not await pair.prefill.held()


async def test_ignored_end_of_sequence(pair: Pair) -> None:  # noqa: F811
    sampling = Sampling(max_tokens=5, temperature=0.0, allowed_token_ids=[EOS], ignore_eos=True)
    answer = await apart(pair, pair.prompt(70, salt=8), sampling)
    assert (answer.tokens, answer.finish_reason) == ([EOS] * 5, "length")


async def test_one_token_and_a_stop_string(pair: Pair) -> None:  # noqa: F811
    """The prefill leg is the whole answer, so it must see the stop string itself."""
    prompt = pair.prompt(60, salt=9)
    one = GREEDY.model_copy(update={"max_tokens": 1})
    expected = await alone(pair, prompt, one)
    text = text_of(expected.tokens, pair.decode_info.model.source)
    first = await pair.prefill.prefill(leg(prompt, one.model_copy(update={"stop": [text]})))
    assert (unpack_tokens(first.first_tokens), first.kv, first.finish_reason, first.stop_reason) == (expected.tokens, None, "stop", text)


async def test_logprobs(pair: Pair) -> None:  # noqa: F811
    prompt, sampling = pair.prompt(100, salt=10), SEEDED.model_copy(update={"logprobs": 4, "max_tokens": 12})

    async def positions(kv_from_prefill: bool) -> list[PositionLogprobs]:
        work = leg(prompt, sampling)
        if kv_from_prefill:
            first, kv = await handoff(pair, prompt, sampling)
            work = replace(work, kv=kv, forced_tokens=first.first_tokens)
        return [entry async for output in pair.decode.generate(work) for entry in output.logprobs]

    expected, got = await positions(False), await positions(True)
    assert [(entry.token_ids, entry.ranks) for entry in got] == [(entry.token_ids, entry.ranks) for entry in expected]
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-3)


async def test_prompt_partly_and_wholly_cached(pair: Pair) -> None:  # noqa: F811
    """A longer prompt after its own prefix, then the same again: only what is missing moves, the answers stay.

    Compared with one engine that finds as much in its cache: how many tokens are computed together decides the order of sums, and on some
    processors that decides between two tokens.
    """
    long, greedy = pair.prompt(1300, salt=11), VARIANTS["greedy"]
    prompts = [long[: 4 * 1000], long, long]
    await pair.forget_prefixes()
    expected = [await collect(pair.decode, leg(prompt, greedy)) for prompt in prompts]
    await pair.decode.drain()
    await pair.forget_prefixes()
    first, second, third = [await apart(pair, prompt, greedy) for prompt in prompts]
    assert [answer.tokens for answer in (first, second, third)] == [answer.tokens for answer in expected]
    block = pair.decode_info.kv_bytes_per_block
    assert [second.last.kv_bytes // block, third.last.kv_bytes // block] == [41 - 31, 1]
    assert [second.last.cached_tokens, third.last.cached_tokens] == [992, 1280]


async def test_twenty_at_once(pair: Pair) -> None:  # noqa: F811
    """Compared with twenty at once on one engine, which are batched alike."""
    prompts = [pair.prompt(20 + 17 * i, salt=12 + i) for i in range(20)]
    await pair.forget_prefixes()
    expected = await asyncio.gather(*(collect(pair.decode, leg(prompt, VARIANTS["greedy"])) for prompt in prompts))
    await pair.forget_prefixes()
    answers = await asyncio.gather(*(apart(pair, prompt, VARIANTS["greedy"]) for prompt in prompts))
    different = [i for i, (a, b) in enumerate(zip(answers, expected, strict=True)) if a.tokens != b.tokens]
    assert not different, f"{len(different)} of 20 differ"


async def test_pulls_do_not_stall(pair: Pair) -> None:  # noqa: F811
    """With NIXL's own defaults one pull in four stalls, for up to 30 s: this finds it if a setting is lost."""
    seconds: list[float] = []
    for number in range(30):
        prompt = pair.prompt(600, salt=100 + number)
        first, kv = await handoff(pair, prompt)
        began = time.perf_counter()
        outputs = pair.decode.generate(leg(prompt, GREEDY, first.first_tokens, kv))
        await anext(outputs)
        seconds.append(time.perf_counter() - began)
        await outputs.aclose()
    seconds.sort()
    print(f"first token with the pull: p50 {seconds[15] * 1000:.1f} ms, max {seconds[-1] * 1000:.1f} ms")
    assert seconds[-1] < 1.0


@pytest.mark.parametrize(
    "change",
    [
        {"num_tokens": 101},
        {"block_size_tokens": 16},
        {"block_ids": [[1, 2, 3]]},
        {"block_ids": [[1, 2, 3, 4, 5]]},
        {"block_ids": [[1, 2, 3, -4]]},
        {"block_ids": [[1, 2, 3, 2**40]]},
        {"block_ids": [[1, 2, 3, 3]]},
        {"block_ids": [[1, 2], [3, 4]]},
        {"block_ids": []},
        {"engine_id": ""},
        {"host": ""},
        {"tensor_parallel": 2},
        {"pipeline_parallel": 2},
        {"transfer_mode": "push"},
        {"cached_tokens": 101},
    ],
    ids=lambda change: "-".join(f"{name}={value}" for name, value in change.items()),
)
async def test_bad_handoffs_never_reach_the_engine(pair: Pair, change: dict[str, object]) -> None:  # noqa: F811
    prompt = pair.prompt(100, salt=13)
    first, kv = await handoff(pair, prompt)
    with pytest.raises(HandoffRefused):
        await collect(pair.decode, leg(prompt, forced=first.first_tokens, kv=kv.model_copy(update=change)))
    assert (await collect(pair.decode, leg(prompt, forced=first.first_tokens, kv=kv))).tokens


@pytest.mark.parametrize(
    "wrong",
    [
        {"structured_output": StructuredOutput(kind="json", value="{nonsense")},
        {"structured_output": StructuredOutput(kind="regex", value="(")},
        {"temperature": 5.0},
        {"min_tokens": 50, "max_tokens": 20},
        {"logit_bias": {"999999": 1.0}},
        {"allowed_token_ids": [999999]},
    ],
    ids=str,
)
async def test_wrong_options_are_refused(pair: Pair, wrong: dict[str, object]) -> None:  # noqa: F811
    sampling = GREEDY.model_copy(update=wrong)
    with pytest.raises(EngineRefused):
        await pair.prefill.prefill(leg(pair.prompt(20), sampling))
    with pytest.raises(EngineRefused):
        await collect(pair.decode, leg(pair.prompt(20), sampling))
    assert (await apart(pair, pair.prompt(20))).tokens


async def test_unknown_adapter_is_refused(pair: Pair) -> None:  # noqa: F811
    with pytest.raises(EngineRefused, match="no adapter 'other'"):
        await pair.prefill.prefill(replace(leg(pair.prompt(20)), lora="other"))


async def test_cancelled_prefill_holds_nothing(pair: Pair) -> None:  # noqa: F811
    """Cancelled at some moment before, during or just after the step that finishes it."""
    for milliseconds in (0, 2, 5, 10, 20, 40, 80):
        task = asyncio.create_task(pair.prefill.prefill(leg(pair.prompt(900, salt=200 + milliseconds))))
        await asyncio.wait({task}, timeout=milliseconds / 1000)
        if task.done() and (kv := task.result().kv) is not None:
            await pair.prefill.release([kv.engine_request_id])
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await nothing_used(pair)


async def test_released_blocks_are_free_at_once(pair: Pair) -> None:  # noqa: F811
    held = [(await handoff(pair, pair.prompt(2000, salt=300 + i)))[1] for i in range(4)]
    assert sum(entry.blocks for entry in (await pair.prefill.held()).values()) == 4 * 63
    assert pair.prefill.stats().used_blocks >= 4 * 63
    await pair.prefill.release([kv.engine_request_id for kv in held])
    await nothing_used(pair)


def test_engine_is_the_contract(pair: Pair) -> None:  # noqa: F811
    assert isinstance(pair.decode, VllmEngine)
    assert pair.decode_info.compatibility == pair.prefill_info.compatibility
    assert pair.decode_info.engine_id != pair.prefill_info.engine_id
