"""What every engine must do, whatever runs the model. An engine's test file subclasses the suites and gives the fixtures.

`pair`: two started engines of one model that outlive the test; `mortal_pair`: two that the test may stop. Nothing here waits
for a time to pass: a test awaits the fact (drained, freed, raised), and the test timeout is the limit.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from itertools import count

import pytest

from jetwake.consumers.engine import Engine, EngineInfo, EngineOutput, Leg, Peer, Prefilled
from jetwake.schemas.blocks import block_hashes, root_hash
from jetwake.schemas.decode import KvReference
from jetwake.schemas.errors import EngineDead, EngineRefused, HandoffRefused, PullFailed
from jetwake.schemas.requests import Sampling
from jetwake.schemas.tokens import pack_tokens, unpack_tokens

_ids = count(1)
GREEDY = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)
SEEDED = Sampling(max_tokens=12, temperature=1.0, seed=7, ignore_eos=True)
# Lengths as (blocks, further tokens): below, at and above a block, and long.
LENGTHS = [(0, 1), (1, -1), (1, 0), (1, 1), (4, 0), (6, 3), (12, -1)]


@dataclass
class Pair:
    """`forget_prefixes` empties both prefix caches; `first_token_id` and on, `num_token_ids` ids may be used in prompts."""

    prefill: Engine
    decode: Engine
    prefill_info: EngineInfo
    decode_info: EngineInfo
    forget_prefixes: Callable[[], Awaitable[None]]
    first_token_id: int = 10
    num_token_ids: int = 200

    @property
    def block(self) -> int:
        return self.prefill_info.model.block_size_tokens

    def prompt(self, length: int, salt: int = 0) -> bytes:
        return pack_tokens(self.first_token_id + (7 * i + 13 * salt + i * i * (salt + 3)) % self.num_token_ids for i in range(length))

    def peer(self) -> Peer:
        info = self.prefill_info
        return Peer(info.engine_id, info.side_channel_host, info.side_channel_port)


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    finish_reason: str | None
    stop_reason: str
    logprobs: int
    last: EngineOutput


def leg(prompt: bytes, sampling: Sampling = GREEDY, forced: bytes = b"", kv: KvReference | None = None, salt: str = "") -> Leg:
    return Leg(f"test-{next(_ids)}", prompt, sampling, cache_salt=salt, forced_tokens=forced, kv=kv)


async def collect(engine: Engine, work: Leg) -> Answer:
    tokens, logprobs, last = list[int](), 0, None
    async with aclosing(engine.generate(work)) as outputs:
        async for output in outputs:
            assert last is None or last.finish_reason is None
            tokens += unpack_tokens(output.tokens)
            logprobs += len(output.logprobs)
            last = output
    assert last is not None
    return Answer(tokens, last.finish_reason, last.stop_reason, logprobs, last)


async def alone(pair: Pair, prompt: bytes, sampling: Sampling = GREEDY, salt: str = "") -> Answer:
    """The reference: the decode engine does both legs, with nothing cached before or after."""
    await pair.forget_prefixes()
    answer = await collect(pair.decode, leg(prompt, sampling, salt=salt))
    await pair.decode.drain()
    await pair.forget_prefixes()
    return answer


async def apart(pair: Pair, prompt: bytes, sampling: Sampling = GREEDY, salt: str = "") -> Answer:
    """The prefill engine fills the cache, the decode engine pulls it."""
    first = await pair.prefill.prefill(leg(prompt, sampling, salt=salt))
    assert first.kv is not None
    return await collect(pair.decode, leg(prompt, sampling, first.first_tokens, first.kv, salt))


async def handoff(pair: Pair, prompt: bytes, sampling: Sampling = GREEDY) -> tuple[Prefilled, KvReference]:
    return await handoff_of(pair, leg(prompt, sampling))


async def handoff_of(pair: Pair, work: Leg) -> tuple[Prefilled, KvReference]:
    first = await pair.prefill.prefill(work)
    assert first.kv is not None
    return first, first.kv


class CacheSeen:
    """What the prefill engine's block changes say that it has cached."""

    def __init__(self, pair: Pair) -> None:
        self._engine = pair.prefill
        self.hashes: set[int] = set()

    async def until_exactly(self, wanted: set[int]) -> None:
        while self.hashes != wanted:
            for change in await self._engine.block_changes():
                if change.kind == "stored":
                    self.hashes.update(change.hashes)
                elif change.kind == "removed":
                    self.hashes.difference_update(change.hashes)
                else:
                    self.hashes.clear()


async def until(fact: Callable[[], bool]) -> None:
    """For facts that nothing tells of; the test's timeout is the limit."""
    while not fact():
        await asyncio.sleep(0.001)


async def nothing_used(pair: Pair) -> None:
    """Returns when no block is used on either side; drains first, so that held blocks must have been let go by the test."""
    for engine in (pair.prefill, pair.decode):
        await engine.drain()
        await until(lambda engine=engine: engine.stats().used_blocks == 0)


class EngineConformance:
    """Needs the fixture `pair`. `concurrency`: requests at once; `exact_when_batched`: whether batching leaves the numbers alone."""

    concurrency = 16
    exact_when_batched = True

    @pytest.fixture(autouse=True)
    async def nothing_left(self, pair: Pair) -> AsyncIterator[None]:
        yield
        await nothing_used(pair)
        assert not await pair.prefill.held()

    @pytest.mark.parametrize(("blocks", "more"), LENGTHS)
    @pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
    async def test_apart_equals_alone(self, pair: Pair, blocks: int, more: int, sampling: Sampling) -> None:
        prompt = pair.prompt(blocks * pair.block + more, salt=blocks + more)
        expected = await alone(pair, prompt, sampling)
        answer = await apart(pair, prompt, sampling)
        assert answer.tokens == expected.tokens
        assert answer.finish_reason == expected.finish_reason == "length"
        assert answer.last.kv_bytes > 0

    @pytest.mark.parametrize("side", ["prefill", "decode", "both"])
    async def test_prefix_cached(self, pair: Pair, side: str) -> None:
        prompt = pair.prompt(5 * pair.block, salt=21)
        expected = await alone(pair, prompt)
        for engine in {"prefill": [pair.prefill], "decode": [pair.decode], "both": [pair.prefill, pair.decode]}[side]:
            await collect(engine, leg(prompt[: 4 * 3 * pair.block]))
        answer = await apart(pair, prompt)
        assert answer.tokens == expected.tokens
        assert answer.last.cached_tokens == (0 if side == "decode" else 3 * pair.block)

    async def test_same_prompt_again(self, pair: Pair) -> None:
        """All of it is cached on both sides by then, and the last token is computed all the same."""
        prompt = pair.prompt(4 * pair.block, salt=22)
        expected = await alone(pair, prompt)
        assert [(await apart(pair, prompt)).tokens for _ in range(3)] == [expected.tokens] * 3

    async def test_cached_blocks_are_not_moved(self, pair: Pair) -> None:
        prompt = pair.prompt(6 * pair.block, salt=23)
        await pair.forget_prefixes()
        cold = await apart(pair, prompt)
        warm = await apart(pair, prompt)
        assert 0 < warm.last.kv_bytes < cold.last.kv_bytes

    async def test_salt_separates(self, pair: Pair) -> None:
        prompt = pair.prompt(4 * pair.block, salt=24)
        await apart(pair, prompt, salt="one")
        first = await pair.prefill.prefill(leg(prompt, salt="two"))
        assert first.cached_tokens == 0
        assert first.kv is not None
        await pair.prefill.release([first.kv.engine_request_id])

    @pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
    async def test_forced_replay_at_every_cut(self, pair: Pair, sampling: Sampling) -> None:
        prompt = pair.prompt(2 * pair.block - 5, salt=25)
        expected = await alone(pair, prompt, sampling)
        for cut in range(sampling.max_tokens + 1):
            answer = await collect(pair.decode, leg(prompt, sampling, pack_tokens(expected.tokens[:cut])))
            assert answer.tokens == expected.tokens

    async def test_forced_tokens_are_obeyed(self, pair: Pair) -> None:
        """Also where the engine would have drawn others; prefill gives the first of them."""
        prompt, forced = pair.prompt(pair.block + 2, salt=26), pair.prompt(4, salt=27)
        first = await pair.prefill.prefill(leg(prompt, forced=forced))
        assert first.first_tokens == forced[:4]
        answer = await collect(pair.decode, leg(prompt, forced=forced, kv=first.kv))
        assert pack_tokens(answer.tokens[:4]) == forced
        assert len(answer.tokens) == GREEDY.max_tokens

    async def test_one_token_ends_at_prefill(self, pair: Pair) -> None:
        prompt = pair.prompt(20, salt=28)
        first = await pair.prefill.prefill(leg(prompt, GREEDY.model_copy(update={"max_tokens": 1})))
        assert (first.kv, first.finish_reason, len(first.first_tokens)) == (None, "length", 4)
        assert not await pair.prefill.held()

    async def test_stop_token_ends_at_prefill(self, pair: Pair) -> None:
        prompt = pair.prompt(20, salt=29)
        token = (await alone(pair, prompt)).tokens[0]
        first = await pair.prefill.prefill(leg(prompt, GREEDY.model_copy(update={"stop_token_ids": [token]})))
        assert (first.kv, first.finish_reason, first.stop_reason) == (None, "stop", str(token))
        assert first.first_tokens == pack_tokens([token])

    async def test_stop_token_ends_at_decode(self, pair: Pair) -> None:
        prompt = pair.prompt(20, salt=30)
        expected = (await alone(pair, prompt, SEEDED)).tokens
        token = next(token for token in expected if token != expected[0])
        answer = await apart(pair, prompt, SEEDED.model_copy(update={"stop_token_ids": [token]}))
        assert answer.tokens == expected[: expected.index(token) + 1]
        assert (answer.finish_reason, answer.stop_reason) == ("stop", str(token))

    async def test_min_tokens_hold_off_the_stop(self, pair: Pair) -> None:
        prompt = pair.prompt(20, salt=31)
        token = (await alone(pair, prompt)).tokens[0]
        sampling = GREEDY.model_copy(update={"stop_token_ids": [token], "min_tokens": 4})
        expected = await alone(pair, prompt, sampling)
        assert token not in expected.tokens[:4]
        assert (await apart(pair, prompt, sampling)).tokens == expected.tokens

    @pytest.mark.parametrize("logprobs", [0, 1, 3])
    async def test_logprobs_for_every_token(self, pair: Pair, logprobs: int) -> None:
        sampling = GREEDY.model_copy(update={"logprobs": logprobs})
        prompt = pair.prompt(pair.block + 3, salt=32)
        first, kv = await handoff(pair, prompt, sampling)
        assert [entry.token_ids[0] for entry in first.logprobs] == unpack_tokens(first.first_tokens)
        async with aclosing(pair.decode.generate(leg(prompt, sampling, first.first_tokens, kv))) as outputs:
            async for output in outputs:
                assert [entry.token_ids[0] for entry in output.logprobs] == unpack_tokens(output.tokens)
                for entry in output.logprobs:
                    assert max(logprobs, 1) <= len(entry.token_ids) <= logprobs + 1
                    assert len(entry.token_ids) == len(entry.logprobs) == len(entry.ranks)

    async def test_no_logprobs_unless_asked(self, pair: Pair) -> None:
        assert (await apart(pair, pair.prompt(20, salt=33))).logprobs == 0

    async def test_held_until_pulled(self, pair: Pair) -> None:
        prompt = pair.prompt(3 * pair.block + 1, salt=34)
        first, kv = await handoff(pair, prompt)
        held = await pair.prefill.held()
        assert held[kv.engine_request_id].blocks == kv.held_blocks == 4
        assert held[kv.engine_request_id].lease_remaining_s > 0
        await collect(pair.decode, leg(prompt, forced=first.first_tokens, kv=kv))
        await pair.prefill.drain()

    async def test_extend_only_lengthens(self, pair: Pair) -> None:
        _, kv = await handoff(pair, pair.prompt(20, salt=35))
        name = kv.engine_request_id
        await pair.prefill.extend([name], 500.0)
        await pair.prefill.extend([name], 1.0)
        assert (await pair.prefill.held())[name].lease_remaining_s > 400
        await pair.prefill.release([name])
        await pair.prefill.drain()

    async def test_unknown_names_are_ignored(self, pair: Pair) -> None:
        await pair.prefill.release(["nobody"])
        await pair.prefill.extend(["nobody"], 5.0)
        await pair.decode.forget("nobody")

    async def test_what_is_cached_is_told_under_our_own_hashes(self, pair: Pair) -> None:
        await pair.forget_prefixes()
        seen = CacheSeen(pair)
        for salt in ("", "tenant"):
            await seen.until_exactly(await self.prefilled(pair, pair.prompt(3 * pair.block + 5, 91), salt) | seen.hashes)
        assert len(seen.hashes) == 6
        await pair.forget_prefixes()
        await seen.until_exactly(await self.prefilled(pair, pair.prompt(2 * pair.block + 1, 92), ""))

    async def prefilled(self, pair: Pair, prompt: bytes, salt: str) -> set[int]:
        """The hashes of what one prefill leaves in the cache."""
        _, kv = await handoff_of(pair, leg(prompt, salt=salt))
        await pair.prefill.release([kv.engine_request_id])
        return set(block_hashes(prompt, pair.block, root_hash(pair.prefill_info.model.model, "", salt)))

    async def test_greeting_twice(self, pair: Pair) -> None:
        await pair.decode.greet(pair.peer())
        await pair.decode.greet(pair.peer())
        await pair.decode.ping(30.0)

    async def test_abort_while_decoding(self, pair: Pair) -> None:
        prompt = pair.prompt(20, salt=36)
        sampling = GREEDY.model_copy(update={"max_tokens": 200})
        first, kv = await handoff(pair, prompt, sampling)
        outputs = pair.decode.generate(leg(prompt, sampling, first.first_tokens, kv))
        await anext(outputs)
        await outputs.aclose()
        await nothing_used(pair)

    async def test_abort_in_every_phase(self, pair: Pair) -> None:
        """Cancelled after 0, 1, 2, ... turns of the loop; what was handed off and not pulled is released by the one who cancelled."""
        prompt = pair.prompt(3 * pair.block, salt=37)
        for turns in range(8):
            task = asyncio.create_task(apart(pair, prompt, GREEDY.model_copy(update={"max_tokens": 100})))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await pair.prefill.release(list(await pair.prefill.held()))
        await nothing_used(pair)

    @pytest.mark.parametrize(
        "change",
        [
            {"block_ids": [[1]]},
            {"block_ids": [[1, 2, 3, 4, 5, 6]]},
            {"block_ids": []},
            {"num_tokens": 3},
            {"block_size_tokens": 7},
            {"tensor_parallel": 4},
        ],
        ids=["few", "many", "none", "tokens", "block-size", "parallel"],
    )
    async def test_malformed_handoff_is_refused(self, pair: Pair, change: dict[str, object]) -> None:
        prompt = pair.prompt(3 * pair.block + 1, salt=38)
        first, kv = await handoff(pair, prompt)
        with pytest.raises(HandoffRefused):
            await collect(pair.decode, leg(prompt, forced=first.first_tokens, kv=kv.model_copy(update=change)))
        assert await pair.prefill.held()
        await collect(pair.decode, leg(prompt, forced=first.first_tokens, kv=kv))

    async def test_own_handoff_is_refused(self, pair: Pair) -> None:
        prompt = pair.prompt(20, salt=39)
        _, kv = await handoff(pair, prompt)
        with pytest.raises(HandoffRefused):
            await collect(pair.prefill, leg(prompt, kv=kv))
        await pair.prefill.release([kv.engine_request_id])

    @pytest.mark.parametrize("change", [{"engine_id": "somebody-else"}, {"port": 1, "engine_id": "nobody"}], ids=["id", "address"])
    async def test_wrong_peer_is_no_answer(self, pair: Pair, change: dict[str, object]) -> None:
        prompt = pair.prompt(20, salt=40)
        first, kv = await handoff(pair, prompt)
        with pytest.raises((HandoffRefused, PullFailed)):
            await collect(pair.decode, leg(prompt, forced=first.first_tokens, kv=kv.model_copy(update=change)))
        await collect(pair.decode, leg(prompt, forced=first.first_tokens, kv=kv))

    async def test_greeting_nobody(self, pair: Pair) -> None:
        with pytest.raises(PullFailed):
            await pair.decode.greet(Peer("nobody", "127.0.0.1", 1))

    async def test_impossible_prompts_are_refused(self, pair: Pair) -> None:
        longest = pair.prefill_info.model.max_model_len_tokens
        for prompt in (b"", pair.prompt(longest), pack_tokens([pair.prefill_info.model.vocabulary_size])):
            with pytest.raises(EngineRefused):
                await pair.prefill.prefill(leg(prompt))
            with pytest.raises(EngineRefused):
                await collect(pair.decode, leg(prompt))

    async def test_many_at_once(self, pair: Pair) -> None:
        prompts = [pair.prompt(10 + 3 * i, salt=50 + i) for i in range(self.concurrency)]
        expected = [(await alone(pair, prompt)).tokens for prompt in prompts]
        answers = await asyncio.gather(*(apart(pair, prompt) for prompt in prompts))
        assert [len(answer.tokens) for answer in answers] == [GREEDY.max_tokens] * self.concurrency
        if self.exact_when_batched:
            assert [answer.tokens for answer in answers] == expected


class EngineLifeConformance:
    """Needs the fixture `mortal_pair`."""

    async def test_dead_peer_is_no_answer(self, mortal_pair: Pair) -> None:
        pair, prompt = mortal_pair, mortal_pair.prompt(40, salt=70)
        assert (await apart(pair, prompt)).tokens
        first, kv = await handoff(pair, pair.prompt(40, salt=71))
        await pair.prefill.stop()
        with pytest.raises(PullFailed):
            await collect(pair.decode, leg(pair.prompt(40, salt=71), forced=first.first_tokens, kv=kv))
        assert (await collect(pair.decode, leg(prompt))).tokens
        await pair.decode.drain()

    async def test_stopped_is_dead(self, mortal_pair: Pair) -> None:
        engine, prompt = mortal_pair.prefill, mortal_pair.prompt(20, salt=72)
        await engine.stop()
        await engine.stop()
        for call in (
            lambda: engine.prefill(leg(prompt)),
            lambda: collect(engine, leg(prompt)),
            engine.held,
            lambda: engine.extend(["x"], 1.0),
            lambda: engine.release(["x"]),
            lambda: engine.ping(5.0),
        ):
            with pytest.raises(EngineDead):
                await call()

    async def test_stop_ends_what_is_in_hand(self, mortal_pair: Pair) -> None:
        engine = mortal_pair.decode
        sampling = GREEDY.model_copy(update={"max_tokens": 150})
        outputs = engine.generate(leg(mortal_pair.prompt(20, salt=73), sampling))
        await anext(outputs)
        rest = asyncio.create_task(_exhaust(outputs))
        await asyncio.sleep(0)
        await engine.stop()
        with pytest.raises(EngineDead):
            await rest


async def _exhaust(outputs: AsyncIterator[EngineOutput]) -> None:
    async for _ in outputs:
        pass
