"""The object store and the key-value bucket, on a real broker, read by nats-py's own too."""

import asyncio
import hashlib
import io
import tracemalloc
from collections.abc import AsyncIterator

import nats
import pytest

from jetwake.deploy.nats_server import NatsServer
from jetwake.pipeline.connection import Bus
from jetwake.pipeline.jetstream import api, objects_stream
from jetwake.pipeline.key_value import Bucket
from jetwake.pipeline.objects import CHUNK_BYTES, ObjectStore, StoredObject, in_chunks
from jetwake.pipeline.publish import Publisher
from jetwake.pipeline.settings import BrokerSettings, TopologySettings
from jetwake.pipeline.topology import drift
from jetwake.schemas.errors import BusRejected, SequenceConflict
from jetwake.schemas.streams import BATCHES_BUCKET, FILES


async def parts_of(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def content(store: ObjectStore, stored: StoredObject) -> bytes:
    return b"".join([part async for part in store.read(stored)])


@pytest.fixture
def store(bus: Bus, publisher: Publisher) -> ObjectStore:
    return ObjectStore(bus, publisher, FILES)


async def messages_in(bus: Bus) -> int:
    return int((await api(bus, f"STREAM.INFO.{objects_stream(FILES.name)}"))["state"]["messages"])


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1, 20 * CHUNK_BYTES + 7])
async def test_what_is_put_is_read(store: ObjectStore, bus: Bus, unique: str, size: int) -> None:
    before, data = await messages_in(bus), bytes(index % 251 for index in range(size))
    await store.put(unique, parts_of(data[:5], data[5:]), {"owner": "me"})
    stored = await store.get(unique)
    assert stored is not None
    assert (stored.size_bytes, stored.metadata) == (size, {"owner": "me"})
    assert await content(store, stored) == data
    assert [found.name async for found in store.all() if found.name == unique] == [unique]
    assert await store.delete(unique)
    assert not await store.delete(unique)
    assert await store.get(unique) is None
    assert await messages_in(bus) == before


async def test_the_later_one_takes_the_place(store: ObjectStore, bus: Bus, unique: str) -> None:
    before = await messages_in(bus)
    await store.put(unique, parts_of(b"one" * CHUNK_BYTES), {})
    await store.put(unique, parts_of(b"two"), {})
    stored = await store.get(unique)
    assert stored is not None
    assert await content(store, stored) == b"two"
    assert await messages_in(bus) == before + 2


async def test_an_upload_that_fails_leaves_nothing(store: ObjectStore, bus: Bus, unique: str) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"x" * (3 * CHUNK_BYTES)
        raise ValueError("the client left")

    before = await messages_in(bus)
    with pytest.raises(ValueError, match="the client left"):
        await store.put(unique, broken(), {})
    assert await store.get(unique) is None
    assert await messages_in(bus) == before


async def test_a_life_ends(store: ObjectStore, unique: str) -> None:
    await store.put(unique, parts_of(b"x"), {}, ttl_s=1)
    async with asyncio.timeout(10):
        while await store.get(unique) is not None:
            await asyncio.sleep(0.05)


async def test_missing_chunks_are_told(store: ObjectStore, bus: Bus, unique: str) -> None:
    stored = await store.put(unique, parts_of(b"x" * (3 * CHUNK_BYTES)), {})
    stream = objects_stream(FILES.name)
    await api(bus, f"STREAM.MSG.DELETE.{stream}", {"seq": stored.first_sequence + 1, "no_erase": True})
    with pytest.raises(BusRejected, match="2 of 3 chunks"):
        await content(store, stored)


async def test_nats_py_reads_ours_and_we_read_its(store: ObjectStore, nats_server: NatsServer, unique: str) -> None:
    data = bytes(range(256)) * 3000
    await store.put(f"{unique}-ours", parts_of(data), {"purpose": "batch"})
    async with await nats.connect(nats_server.url) as client:
        theirs = await client.jetstream().object_store(FILES.name)
        assert (await theirs.get(f"{unique}-ours")).data == data
        await theirs.put(f"{unique}-theirs", io.BytesIO(data))
        stored = await store.get(f"{unique}-theirs")
        assert stored is not None
        assert await content(store, stored) == data
        await theirs.delete(f"{unique}-theirs")
        assert await store.get(f"{unique}-theirs") is None


async def test_a_hundred_megabytes_never_are_in_memory_together(store: ObjectStore, unique: str) -> None:
    digest, block = hashlib.sha256(), bytes(range(256)) * 4096

    async def many() -> AsyncIterator[bytes]:
        for _ in range(100):
            digest.update(block)
            yield block

    tracemalloc.start()
    stored = await store.put(unique, many(), {})
    read = hashlib.sha256()
    async for part in store.read(stored):
        read.update(part)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert stored.size_bytes == 100 << 20
    assert read.digest() == digest.digest()
    assert peak_bytes < 32 << 20
    await store.delete(unique)


async def test_chunks_have_one_size() -> None:
    assert [chunk async for chunk in in_chunks(parts_of(b"abc", b"d", b"efghij"), 4)] == [b"abcd", b"efgh", b"ij"]
    assert [chunk async for chunk in in_chunks(parts_of(b"", b"abcd"), 4)] == [b"abcd"]


async def test_of_two_writers_one_wins(bus: Bus, publisher: Publisher, unique: str) -> None:
    bucket = Bucket(bus, publisher, BATCHES_BUCKET)
    entry = await bucket.create(unique, b"1")
    with pytest.raises(SequenceConflict):
        await bucket.create(unique, b"other")
    later = await bucket.update(entry, b"2")
    with pytest.raises(SequenceConflict):
        await bucket.update(entry, b"other")
    assert await bucket.get(unique) == later
    assert [found async for found in bucket.entries() if found.key == unique] == [later]
    assert await bucket.get(f"{unique}x") is None


async def test_an_expired_key_is_gone(bus: Bus, publisher: Publisher, unique: str) -> None:
    bucket = Bucket(bus, publisher, BATCHES_BUCKET)
    await bucket.create(unique, b"1", ttl_s=1)
    async with asyncio.timeout(10):
        while await bucket.get(unique) is not None:
            await asyncio.sleep(0.05)
    await bucket.create(unique, b"2")


async def test_the_store_is_as_declared(nats_server: NatsServer) -> None:
    async with Bus.connect(BrokerSettings(url=nats_server.url), "looker") as bus:
        assert not [line for line in await drift(bus, TopologySettings()) if "OBJ_" in line]
