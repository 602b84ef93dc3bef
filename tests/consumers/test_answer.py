"""What goes out of an answer: every token once and in order, an eager engine's tokens together, a slow one's at once."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from jetwake.consumers.answer import Answer
from jetwake.consumers.engine import EngineOutput
from jetwake.pipeline.connection import Bus
from jetwake.pipeline.merge import joined, tail
from jetwake.pipeline.publish import Publisher
from jetwake.pipeline.raw import RawMessage
from jetwake.schemas import subjects
from jetwake.schemas.codec import decode
from jetwake.schemas.replies import PositionLogprobs, TokenChunk
from jetwake.schemas.requests import InferenceRequest
from jetwake.schemas.tokens import pack_tokens, token_count, unpack_tokens


def output(token: int, last: bool = False) -> EngineOutput:
    return EngineOutput(tokens=pack_tokens([token]), finish_reason="length" if last else None, cached_tokens=3)


async def answer_of(bus: Bus, publisher: Publisher, gateway: str) -> tuple[Answer, "asyncio.Queue[TokenChunk]"]:
    chunks: asyncio.Queue[TokenChunk] = asyncio.Queue()

    def take(message: RawMessage) -> None:
        chunks.put_nowait(decode(message.data, TokenChunk))

    await bus.subscribe(subjects.replies_of(gateway), take)
    await bus.flush()
    return Answer(publisher, InferenceRequest(request_id="r1", gateway=gateway, model="m", prompt_tokens=pack_tokens([1]))), chunks


async def test_an_engine_that_is_ahead_has_its_tokens_gathered(bus: Bus, publisher: Publisher, unique: str) -> None:
    answer, chunks = await answer_of(bus, publisher, unique)
    for token in range(200):
        await answer.add(output(token))
    given, count = list[int](), 0
    async with asyncio.timeout(10):
        while len(given) < 200:  # without another output: what waits is sent by itself
            chunk = await chunks.get()
            assert chunk.offset == len(given)
            assert (chunk.cached_tokens == 3) == (chunk.offset == 0)
            given, count = given + unpack_tokens(chunk.tokens), count + 1
    assert given == list(range(200))
    assert count < 100
    assert answer.tokens == pack_tokens(range(200))


async def test_what_waits_when_the_answer_ends_is_left_to_the_terminal(bus: Bus, publisher: Publisher, unique: str) -> None:
    answer, chunks = await answer_of(bus, publisher, unique)
    for token in range(4):
        await answer.add(output(token, last=token == 3))
    await answer.aclose()
    await bus.flush()
    told = [chunks.get_nowait() for _ in range(chunks.qsize())]
    assert b"".join(chunk.tokens for chunk in told) == pack_tokens(range(4))[: sum(len(chunk.tokens) for chunk in told)]
    assert unpack_tokens(answer.finished("p", "d", 0).tokens) == [0, 1, 2, 3]


@given(st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=20), st.data(), st.booleans())
def test_parts_beside_each_other_join_to_what_they_were(tokens: list[int], data: st.DataObject, with_logprobs: bool) -> None:
    logprobs = [PositionLogprobs(token_ids=[token], logprobs=[-0.5], ranks=[1]) for token in tokens] if with_logprobs else []
    whole = TokenChunk(request_id="r", attempt=2, offset=5, tokens=pack_tokens(tokens), logprobs=logprobs, cached_tokens=7)
    cut = data.draw(st.integers(1, len(tokens) - 1))
    first = whole.model_copy(update={"tokens": whole.tokens[: 4 * cut], "logprobs": logprobs[:cut]})
    second = tail(whole, 5 + cut)
    assert second is not None
    assert joined(first, second) == whole
    assert joined(second, first) is None
    assert joined(first, second.model_copy(update={"attempt": 3})) is None
    assert joined(first, second.model_copy(update={"offset": second.offset + 1})) is None
    assert token_count(first.tokens) == cut
