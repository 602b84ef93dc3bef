"""The simulated engine: the shared suites, and what only it promises."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from jetwake.consumers.engine import EngineInfo
from jetwake.consumers.engine_simulated import SimulatedEngine, SimulatedSettings
from jetwake.consumers.simulated_cache import block_changes
from jetwake.consumers.timing import PolynomialTiming
from jetwake.schemas.blocks import block_hashes, root_hash
from jetwake.schemas.errors import EngineRefused, PullFailed, SetupError
from jetwake.schemas.requests import Sampling, StructuredOutput
from jetwake.schemas.tokens import pack_tokens, unpack_tokens

from .conformance import (
    GREEDY,
    SEEDED,
    EngineConformance,
    EngineLifeConformance,
    Pair,
    alone,
    apart,
    collect,
    handoff,
    leg,
    nothing_used,
    until,
)

SETTINGS = SimulatedSettings(vocabulary_size=1000, max_model_len_tokens=1024, num_blocks=512)
SLOW = PolynomialTiming(prefill_ms=(0, 0, 1), decode_ms=(0, 0, 2))
NewPair = Callable[..., Coroutine[Any, Any, Pair]]


def as_pair(prefill: SimulatedEngine, decode: SimulatedEngine, infos: list[EngineInfo]) -> Pair:
    async def forget_prefixes() -> None:
        prefill.pool.clear_cache()
        decode.pool.clear_cache()

    return Pair(prefill, decode, *infos, forget_prefixes=forget_prefixes)


async def start_pair(settings: SimulatedSettings, decode_settings: SimulatedSettings | None = None) -> Pair:
    engines = SimulatedEngine(settings), SimulatedEngine(decode_settings or settings)
    return as_pair(*engines, [await engine.start() for engine in engines])


async def stop_pair(pair: Pair) -> None:
    await pair.prefill.stop()
    await pair.decode.stop()


@pytest.fixture(scope="module")
async def pair() -> AsyncIterator[Pair]:
    pair = await start_pair(SETTINGS)
    yield pair
    await stop_pair(pair)


@pytest.fixture
async def mortal_pair() -> AsyncIterator[Pair]:
    pair = await start_pair(SETTINGS.model_copy(update={"timing": SLOW}))
    yield pair
    await stop_pair(pair)


@pytest.fixture
async def new_pair() -> AsyncIterator[NewPair]:
    """Pairs with other settings than the usual; stopped at the end."""
    pairs: list[Pair] = []

    async def make(**changes: Any) -> Pair:
        pairs.append(await start_pair(SETTINGS.model_copy(update=changes)))
        return pairs[-1]

    yield make
    for pair in pairs:
        await stop_pair(pair)


class TestConformance(EngineConformance):
    concurrency = 64


class TestLife(EngineLifeConformance):
    pass


async def test_conformance_with_time(new_pair: NewPair) -> None:
    """With steps that take time the answers are the same, and requests share the steps."""
    pair = await new_pair(timing=PolynomialTiming((0, 0, 1), (0, 0, 1), least_decode_ms=0.1, speed=5))
    prompts = [pair.prompt(50, salt=i) for i in range(20)]
    expected = [(await alone(pair, prompt)).tokens for prompt in prompts[:2]]
    answers = await asyncio.gather(*(apart(pair, prompt, SEEDED) for prompt in prompts))
    assert [(await apart(pair, prompt)).tokens for prompt in prompts[:2]] == expected
    assert all(len(answer.tokens) == SEEDED.max_tokens for answer in answers)


async def test_end_of_sequence(new_pair: NewPair) -> None:
    """With few tokens the end comes by chance, at the first token of some prompts and later in others."""
    pair = await new_pair(vocabulary_size=20, eos_token_id=3)
    pair.first_token_id, pair.num_token_ids = 0, 20
    sampling = Sampling(max_tokens=100, temperature=0.0)
    places = set[int]()
    for salt in range(60):
        prompt = pair.prompt(20, salt)
        expected = await alone(pair, prompt, sampling)
        places.add(expected.tokens.index(3) if 3 in expected.tokens else -1)
        first = await pair.prefill.prefill(leg(prompt, sampling))
        if first.kv is None:
            assert (unpack_tokens(first.first_tokens), first.finish_reason, first.stop_reason) == ([3], "stop", "")
            continue
        answer = await collect(pair.decode, leg(prompt, sampling, first.first_tokens, first.kv))
        assert (answer.tokens, answer.finish_reason) == (expected.tokens, expected.finish_reason)
    assert 0 in places
    assert len(places) > 3
    await nothing_used(pair)


async def test_answers_depend_on_everything_named(pair: Pair) -> None:
    prompt = pair.prompt(40)
    plain = (await alone(pair, prompt, SEEDED)).tokens
    assert (await alone(pair, prompt, SEEDED, salt="tenant")).tokens != plain
    assert (await alone(pair, prompt, SEEDED.model_copy(update={"seed": 8}))).tokens != plain
    assert (await alone(pair, pair.prompt(40, salt=1), SEEDED)).tokens != plain
    continued = await alone(pair, prompt + pack_tokens(plain[:5]), SEEDED)
    assert continued.tokens[:7] == plain[5:]


async def test_allowed_tokens_are_obeyed(pair: Pair) -> None:
    answer = await alone(pair, pair.prompt(20), GREEDY.model_copy(update={"allowed_token_ids": [5, 6]}))
    assert set(answer.tokens) <= {5, 6}


@pytest.mark.parametrize("sampling", [Sampling(structured_output=StructuredOutput(kind="json")), Sampling(bad_words=["x"])])
async def test_what_needs_text_is_refused(pair: Pair, sampling: Sampling) -> None:
    with pytest.raises(EngineRefused, match="no tokenizer"):
        await pair.prefill.prefill(leg(pair.prompt(20), sampling))


async def test_lease_expires(new_pair: NewPair) -> None:
    pair = await new_pair(lease_s=0.05)
    await handoff(pair, pair.prompt(100))
    await until(lambda: pair.prefill.stats().used_blocks == 0)
    assert pair.prefill.stats().counters["leases_expired"] == 1


async def test_recycled_reference_is_no_answer(new_pair: NewPair) -> None:
    """The blocks were freed and given to another prompt: readable, and wrong."""
    pair = await new_pair(num_blocks=8)
    first, kv = await handoff(pair, pair.prompt(100))
    await pair.prefill.release([kv.engine_request_id])
    _, other = await handoff(pair, pair.prompt(100, salt=1))
    assert set(other.block_ids[0]) & set(kv.block_ids[0])
    with pytest.raises(PullFailed, match="does not hold this prompt"):
        await collect(pair.decode, leg(pair.prompt(100), forced=first.first_tokens, kv=kv))
    assert pair.decode.stats().counters["blocks_wrong"] > 0
    await pair.prefill.release([other.engine_request_id])
    await nothing_used(pair)


async def test_swapped_blocks_are_no_answer(pair: Pair) -> None:
    first, kv = await handoff(pair, pair.prompt(64))
    swapped = kv.model_copy(update={"block_ids": [list(reversed(kv.block_ids[0]))]})
    with pytest.raises(PullFailed, match="block 0 of 4"):
        await collect(pair.decode, leg(pair.prompt(64), forced=first.first_tokens, kv=swapped))
    await nothing_used(pair)


async def test_block_ids_outside_the_peer(pair: Pair) -> None:
    first, kv = await handoff(pair, pair.prompt(20))
    with pytest.raises(PullFailed, match="has 512 blocks"):
        await collect(pair.decode, leg(pair.prompt(20), forced=first.first_tokens, kv=kv.model_copy(update={"block_ids": [[0, 512]]})))
    await pair.prefill.release([kv.engine_request_id])


async def test_peer_with_other_blocks(pair: Pair) -> None:
    other = SimulatedEngine(SETTINGS.model_copy(update={"block_bytes": 256}))
    info = await other.start()
    with pytest.raises(PullFailed, match="256 bytes"):
        await pair.decode.greet(Pair(other, other, info, info, pair.forget_prefixes).peer())
    await other.stop()


async def test_waiting_for_room(new_pair: NewPair) -> None:
    """Four prompts at a time fit; all are answered, in turn."""
    pair = await new_pair(num_blocks=16)
    prompts = [pair.prompt(50, salt=i) for i in range(40)]
    answers = await asyncio.gather(*(apart(pair, prompt) for prompt in prompts))
    assert [answer.tokens for answer in answers] == [(await alone(pair, prompt)).tokens for prompt in prompts]


async def test_growing_out_of_room(new_pair: NewPair) -> None:
    """Each fits alone, not all together: some give up their blocks and go on later, with the same answer."""
    pair = await new_pair(num_blocks=16)
    sampling = GREEDY.model_copy(update={"max_tokens": 200})
    prompts = [pair.prompt(20, salt=i) for i in range(6)]
    answers = await asyncio.gather(*(collect(pair.decode, leg(prompt, sampling)) for prompt in prompts))
    assert pair.decode.stats().counters["preemptions"] > 0
    assert [answer.tokens for answer in answers] == [(await alone(pair, prompt, sampling)).tokens for prompt in prompts]


async def test_never_fits(new_pair: NewPair) -> None:
    pair = await new_pair(num_blocks=4)
    with pytest.raises(EngineRefused, match="may need 7 KV blocks, the engine has 4"):
        await pair.prefill.prefill(leg(pair.prompt(100)))
    with pytest.raises(EngineRefused, match="may need 5 KV blocks, the engine has 4"):
        await collect(pair.decode, leg(pair.prompt(60), Sampling(max_tokens=10)))


async def test_no_room_in_time(new_pair: NewPair) -> None:
    pair = await new_pair(num_blocks=4, room_timeout_s=0.02)
    _, kv = await handoff(pair, pair.prompt(60))
    with pytest.raises(EngineRefused, match="no room for 60 tokens"):
        await pair.prefill.prefill(leg(pair.prompt(60, salt=1)))
    await pair.prefill.release([kv.engine_request_id])


async def test_slots_bound_what_runs(new_pair: NewPair) -> None:
    pair = await new_pair(slots=2, timing=SLOW)
    tasks = [asyncio.create_task(collect(pair.decode, leg(pair.prompt(20, salt=i)))) for i in range(6)]
    await until(lambda: pair.decode.stats().running_requests == 2)
    assert pair.decode.stats().waiting_requests == 4
    await asyncio.gather(*tasks)


async def test_failed_start_leaves_nothing(pair: Pair) -> None:
    engine = SimulatedEngine(SETTINGS.model_copy(update={"side_channel_port": pair.prefill_info.side_channel_port}))
    with pytest.raises(SetupError, match="cannot listen"):
        await engine.start()
    await engine.stop()


async def test_cancelled_at_random_nothing_foreign(new_pair: NewPair) -> None:
    """A small cache, many requests, a third of them cancelled at some point: those that answer, answer right."""
    pair = await new_pair(num_blocks=64)
    prompts = [pair.prompt(40 + i % 60, salt=i % 17) for i in range(300)]
    expected = {prompt: (await alone(pair, prompt)).tokens for prompt in set(prompts)}

    async def one(place: int, prompt: bytes) -> list[int] | None:
        task = asyncio.create_task(apart(pair, prompt))
        if place % 3:
            return (await task).tokens
        for _ in range(place % 23):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return None

    answers = await asyncio.gather(*(one(place, prompt) for place, prompt in enumerate(prompts)))
    await pair.prefill.release(list(await pair.prefill.held()))
    await nothing_used(pair)
    assert all(answer in (None, expected[prompt]) for answer, prompt in zip(answers, prompts, strict=True))
    assert pair.decode.stats().counters["blocks_wrong"] == 0


async def test_block_events_name_the_prompt(new_pair: NewPair) -> None:
    pair = await new_pair(record_block_events=True)
    prompt = pair.prompt(50)
    await apart(pair, prompt)
    hashes = block_hashes(prompt, 16, root_hash("simulated"))
    for engine in (pair.prefill, pair.decode):
        assert isinstance(engine, SimulatedEngine)
        assert hashes == list(engine.pool.cached_hashes())[:3]
        assert [block for change in block_changes(engine.pool) for block in change.hashes][:3] == hashes
    await nothing_used(pair)


async def test_room_is_given_in_order_of_arrival(new_pair: NewPair) -> None:
    """A small request that would fit does not overtake a large one that waits."""
    pair = await new_pair(num_blocks=8)
    _, kv = await handoff(pair, pair.prompt(6 * 16))
    large = asyncio.create_task(pair.prefill.prefill(leg(pair.prompt(8 * 16, salt=1))))
    await asyncio.sleep(0)
    small = asyncio.create_task(pair.prefill.prefill(leg(pair.prompt(20, salt=2))))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not small.done()
    await pair.prefill.release([kv.engine_request_id])
    first = await large
    assert first.kv is not None
    assert not small.done()
    await pair.prefill.release([first.kv.engine_request_id])
    await small


async def test_one_that_waited_behind_its_prefix_finds_it_cached(new_pair: NewPair) -> None:
    """As with vLLM: the cache is looked at when a prefill begins, not when the request arrives."""
    pair = await new_pair(timing=SLOW)
    prompt = pair.prompt(65)
    first, second = await asyncio.gather(pair.prefill.prefill(leg(prompt)), pair.prefill.prefill(leg(prompt)))
    assert (first.cached_tokens, second.cached_tokens) == (0, 64)
