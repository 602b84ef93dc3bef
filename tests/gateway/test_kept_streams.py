"""Places in a stream, and what is kept of it in the broker. No vLLM."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetwake.deploy.nats_server import NatsServer
from jetwake.pipeline.clock import WallClock
from jetwake.pipeline.connection import Bus
from jetwake.pipeline.publish import Publisher
from jetwake.pipeline.replies import ReplyInbox
from jetwake.pipeline.settings import BrokerSettings, TopologySettings
from jetwake.pipeline.topology import ensure_topology
from jetwake.producers.gateway.exchange import Exchange
from jetwake.producers.gateway.kept_streams import KeptStreams
from jetwake.producers.gateway.positions import Point, Position, cut, event_id, split_event_id
from jetwake.producers.gateway.resuming import Resuming, Wanted
from jetwake.producers.gateway.streaming import Streaming
from jetwake.schemas import subjects
from jetwake.schemas.errors import InvalidRequest, StreamMissing, UnknownRequest
from jetwake.schemas.replies import TokenChunk
from jetwake.schemas.requests import InferenceRequest
from jetwake.schemas.tokens import pack_tokens, unpack_tokens

REQUEST = InferenceRequest(request_id="r-1", gateway="gateway-1", model="sim", prompt_tokens=pack_tokens([1]), tenant="acme")
PATH = "/v1/chat/completions"


@given(st.integers(0, 10**6), st.booleans(), st.integers(0, 999), st.integers(0, 2**32 - 1))
def test_an_id_names_its_place(tokens: int, ended: bool, event: int, digest: int) -> None:
    position = Position(tokens, ended, event)
    assert split_event_id(event_id("job-1_x", position, digest)) == ("job-1_x", Point(position, digest))


@given(st.text(max_size=60))
def test_other_texts_are_refused(text: str) -> None:
    try:
        _, point = split_event_id(text)
    except InvalidRequest:
        return
    assert point.position.tokens >= 0


@given(st.integers(1, 50), st.integers(0, 50), st.booleans(), st.tuples(st.integers(0, 120), st.integers(0, 120)))
def test_cutting_changes_no_token(length: int, offset: int, at_each_token: bool, at: tuple[int, int]) -> None:
    chunk = TokenChunk(request_id="r", attempt=1, offset=offset, tokens=pack_tokens(range(length)))
    parts = [part for part in cut(chunk, at_each_token, at) if isinstance(part, TokenChunk)]
    assert [token for part in parts for token in unpack_tokens(part.tokens)] == list(range(length))
    ends = [part.offset + len(part.tokens) // 4 for part in parts]
    assert [part.offset for part in parts] == [offset, *ends[:-1]]
    assert {place for place in at if offset < place < offset + length} <= set(ends)
    if at_each_token:
        assert len(parts) == length


@pytest.fixture
async def bus(tmp_path: Path) -> AsyncIterator[Bus]:
    async with NatsServer(tmp_path, sync_always=False) as server, Bus.connect(BrokerSettings(url=server.url), name="gateway-2") as bus:
        await ensure_topology(bus, TopologySettings())
        yield bus


def kept_streams(bus: Bus, inbox: ReplyInbox | None = None) -> KeptStreams:
    kept = KeptStreams(bus, Publisher(bus), inbox or ReplyInbox(bus, "gateway-2", WallClock()), grace_s=0.2)
    kept.rendering = "same"
    return kept


async def test_a_stream_is_there_for_its_tenant_alone(bus: Bus) -> None:
    kept = kept_streams(bus)
    resuming = Resuming(kept)
    await kept.keep(REQUEST, Streaming(PATH, b'{"stream": true}', by_token=False))
    wanted = Wanted("r-1", split_event_id("r-1:0")[1])
    found = await resuming.found(wanted, Exchange(tenant="acme"), b"")
    assert (found.path, found.body) == (PATH, b'{"stream": true}')
    for tenant in ("globex", ""):
        with pytest.raises(UnknownRequest) as refused:
            await resuming.found(wanted, Exchange(tenant=tenant), b"")
        with pytest.raises(UnknownRequest) as nobody:
            await resuming.found(Wanted("r-2", wanted.since), Exchange(tenant=tenant), b"")
        assert str(refused.value).replace("r-1", "r-2") == str(nobody.value), "no word more than of what never was"


async def test_the_last_reader_decides(bus: Bus) -> None:
    kept, ended = kept_streams(bus), list[str]()

    async def leave(reader: str) -> None:
        await kept.end_unless_taken_up("r-1", reader, lambda: ended.append(reader))

    await leave("first")
    assert ended == ["first"]
    leaving = asyncio.create_task(leave("first"))
    await kept.claim("r-1", "second")
    await leaving
    assert ended == ["first"], "somebody else reads now"
    await leave("second")
    assert ended == ["first", "second"]


async def test_whoever_reads_in_place_of_a_gateway_is_its_reader(bus: Bus) -> None:
    inbox = ReplyInbox(bus, "gateway-2", WallClock())
    await inbox.start()
    kept = kept_streams(bus, inbox)
    await kept.keep(REQUEST, Streaming(PATH, b"{}", by_token=False))
    with pytest.raises(StreamMissing):
        await bus.request(subjects.presence("gateway-1"), b"", timeout_s=1.0)
    replies = await kept.read_again(await kept.find("r-1"))
    with pytest.raises(TimeoutError):  # there is somebody, who says nothing
        async with asyncio.timeout(0.2):
            await bus.request(subjects.presence("gateway-1"), b"", timeout_s=5.0)
    replies.close()
    await inbox.close()
    with pytest.raises(StreamMissing):
        await bus.request(subjects.presence("gateway-1"), b"", timeout_s=1.0)
