"""A broker of three servers: what one of them takes with it when it dies, and what it does not."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path

import pytest

from jetwake.deploy.nats_cluster import NatsCluster, wait_until_agreed, wait_until_whole
from jetwake.deploy.nats_server import NatsServer
from jetwake.pipeline import topology_keeper
from jetwake.pipeline.cards import CARD_TTL_S, HEARTBEAT_S
from jetwake.pipeline.clock import WallClock
from jetwake.pipeline.connection import Bus
from jetwake.pipeline.jetstream import SEQUENCE_HEADER, api, api_subject, bucket_stream, leader_get_path, newest_message
from jetwake.pipeline.patience import when_ready
from jetwake.pipeline.publish import Publisher
from jetwake.pipeline.registry import CardKeeper, Registry
from jetwake.pipeline.settings import BrokerSettings, TopologySettings
from jetwake.pipeline.terminals import Terminals
from jetwake.pipeline.topology import drift, durables, ensure_consumer, stream_created_ns, subject_counts
from jetwake.pipeline.topology_keeper import TopologyKeeper
from jetwake.schemas import subjects
from jetwake.schemas.errors import BusError, StreamMissing
from jetwake.schemas.replies import Cancelled
from jetwake.schemas.streams import EVENTS, HANDOFF, MODELS_BUCKET, PREFILL, REQUESTS, RESULTS, STREAMS, WORKERS_BUCKET, prefill_consumer

from .harness import request, until
from .test_registry import card

NO_LEADER = 10008


@pytest.fixture(scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[NatsCluster]:
    folder: Path = tmp_path_factory.mktemp("cluster")
    async with NatsCluster(folder, 3, sync_always=False) as cluster:
        await wait_until_agreed(BrokerSettings(url=cluster.url))
        async with Bus.connect(BrokerSettings(url=cluster.url), "topology") as bus:
            keeper = TopologyKeeper(bus, TopologySettings(replicas=3))
            await keeper.start()
            assert await wait_until_whole(bus, 30) == []
            # As in every system: of a stream in memory these tests can take away more copies than the cluster bears.
            keeping = asyncio.create_task(keeper.run())
            yield cluster
            keeping.cancel()


@pytest.fixture
async def bus(cluster: NatsCluster) -> AsyncIterator[Bus]:
    async with Bus.connect(BrokerSettings(url=cluster.url), "test") as bus:
        yield bus
        for server in cluster.servers:  # where a test failed half-way
            if not server.is_running:
                await server.start()
        assert await wait_until_whole(bus, 60 + topology_keeper.LEADERLESS_S) == []


async def leader_of(bus: Bus, cluster: NatsCluster, stream: str) -> NatsServer:
    name = (await api(bus, f"STREAM.INFO.{stream}"))["cluster"]["leader"]
    return next(server for server in cluster.servers if server.store_dir.name == name)


async def test_no_worker_is_dead_because_the_leader_of_their_cards_is(cluster: NatsCluster, bus: Bus, unique: str) -> None:
    leader = await leader_of(bus, cluster, bucket_stream(WORKERS_BUCKET.name))
    others = ",".join(server.url for server in cluster.servers if server is not leader)
    async with (
        Bus.connect(BrokerSettings(url=others), "worker") as worker,
        Bus.connect(BrokerSettings(url=others), "router") as router,
        asyncio.TaskGroup() as tasks,
    ):
        keeper, registry = CardKeeper(worker, Publisher(worker)), Registry(router)
        await keeper.announce(card(unique))
        await registry.start()
        seen: list[bool] = []
        registry.on_change(lambda: seen.append(unique in registry.workers))
        running = [tasks.create_task(keeper.run()), tasks.create_task(registry.run())]
        await leader.kill()
        await until_stored(bus, WORKERS_BUCKET.name, unique)
        await asyncio.sleep(CARD_TTL_S + HEARTBEAT_S)  # what the new leader says of expired cards comes within this
        assert unique in registry.workers
        assert all(seen)
        await leader.start()
        for task in running:
            task.cancel()


async def until_stored(bus: Bus, bucket: str, key: str) -> None:
    """A card that was renewed by the new leader."""
    stream, subject = bucket_stream(bucket), f"$KV.{bucket}.{key}"
    before = await newest_sequence(bus, stream, subject)
    async with asyncio.timeout(60):
        while await newest_sequence(bus, stream, subject) in (before, 0):
            await asyncio.sleep(0.1)


async def newest_sequence(bus: Bus, stream: str, subject: str) -> int:
    try:
        message = await newest_message(bus, stream, subject)
    except BusError:
        return 0
    return 0 if message is None else int(message.headers["Nats-Sequence"])


async def test_what_is_stored_while_a_leader_dies_is_stored_once(cluster: NatsCluster, bus: Bus, unique: str) -> None:
    publisher, stored = Publisher(bus), list[str]()

    async def store(number: int) -> None:
        subject = subjects.requests(f"{unique}{number}", "batch")
        await publisher.store(subject, request(f"{unique}-{number}"), message_id=f"{unique}-{number}")
        assert await newest_message(bus, REQUESTS.name, subject) is not None  # by whoever leads now
        stored.append(subject)

    async with asyncio.TaskGroup() as tasks:
        for number in range(20):
            tasks.create_task(store(number))
        leader = await leader_of(bus, cluster, REQUESTS.name)
        await leader.kill()
        for number in range(20, 40):
            tasks.create_task(store(number))
    await leader.start()
    assert len(stored) == 40
    counts = await subject_counts(bus, REQUESTS.name)
    assert {subject: counts[subject] for subject in stored} == dict.fromkeys(stored, 1)


async def test_one_end_for_each_request_whoever_leads(cluster: NatsCluster, bus: Bus, unique: str) -> None:
    """Two writers end the same requests while the stream of ends loses its leader."""
    async with Bus.connect(BrokerSettings(url=cluster.url), "other") as other:
        writers = [Terminals(each, Publisher(each), WallClock()) for each in (bus, other)]
        asked = [request(f"{unique}-{number}", gateway=unique) for number in range(30)]
        ends: dict[str, list[bool]] = {each.request_id: [] for each in asked}

        async def end(writer: Terminals, number: int) -> None:
            won = await writer.end(asked[number], Cancelled(request_id=asked[number].request_id, model="tiny", attempt=1))
            ends[asked[number].request_id].append(won)

        async with asyncio.TaskGroup() as tasks:
            for number in range(15):
                for writer in writers:
                    tasks.create_task(end(writer, number))
            leader = await leader_of(bus, cluster, RESULTS.name)
            await leader.kill()
            for number in range(15, 30):
                for writer in writers:
                    tasks.create_task(end(writer, number))
        await leader.start()
        assert all(sorted(won) == [False, True] for won in ends.values()), ends
        counts = await subject_counts(bus, RESULTS.name, subjects.results_of("*", unique))
        assert sorted(counts.values()) == [1] * 30
    await until(lambda: bus.connected)


async def test_what_a_leader_is_asked_for_waits_until_there_is_one(cluster: NatsCluster, bus: Bus, unique: str) -> None:
    """Also where the servers that are left say that there is none, and are not silent."""
    subject = subjects.requests(unique, "batch")
    stored = await Publisher(bus).store(subject, request(unique), message_id=unique)
    leader = await leader_of(bus, cluster, REQUESTS.name)
    others = [server for server in cluster.servers if server is not leader]
    async with Bus.connect(BrokerSettings(url=leader.url, request_timeout_s=0.5, election_grace_s=60.0), "lonely") as lonely:
        for server in others:
            await server.kill()
        async with asyncio.timeout(60):
            while not await says_that_there_is_none(lonely, REQUESTS.name, subject):
                await asyncio.sleep(0.1)
        reading = asyncio.create_task(newest_message(lonely, REQUESTS.name, subject))
        await says_that_there_is_none(lonely, REQUESTS.name, subject)  # the reader has been told so, too
        for server in others:
            await server.start()
        async with asyncio.timeout(60):
            message = await reading
    assert message is not None
    assert message.headers[SEQUENCE_HEADER] == str(stored.sequence)


async def says_that_there_is_none(bus: Bus, stream: str, subject: str) -> bool:
    try:
        answer = await bus.request(api_subject(leader_get_path(stream)), json.dumps({"last_by_subj": subject}).encode())
    except BusError:
        return False
    return json.loads(answer.data).get("error", {}).get("err_code") == NO_LEADER


async def test_what_is_declared_at_a_start_waits_for_a_cluster_without_a_leader(cluster: NatsCluster, bus: Bus, unique: str) -> None:
    """Two of three are down as a worker begins: one server alone decides nothing."""
    *others, last = cluster.servers
    tries = 0

    async def declare() -> None:
        nonlocal tries
        tries += 1
        await ensure_consumer(lonely, prefill_consumer(unique))

    async with Bus.connect(BrokerSettings(url=last.url, request_timeout_s=0.5, election_grace_s=0.5), "worker") as lonely:
        for server in others:
            await server.kill()
        declaring = asyncio.create_task(when_ready(lonely, declare))
        await until(lambda: tries == 3)
        for server in others:
            await server.start()
        await declaring
        assert unique in await when_ready(bus, lambda: durables(bus, PREFILL.name))


async def test_those_that_declare_the_same_at_the_same_time_all_find_it_there(cluster: NatsCluster, bus: Bus) -> None:
    """Each would count from another moment, so what they ask for is not the same; the servers agree on the first."""
    names, settings = [EVENTS.name, HANDOFF.name, bucket_stream(MODELS_BUCKET.name)], TopologySettings(replicas=3)
    async with AsyncExitStack() as stack:
        starting = [
            await stack.enter_async_context(Bus.connect(BrokerSettings(url=server.url), "starting"))
            for server in cluster.servers
            for _ in range(3)
        ]
        for _ in range(5):
            for name in names:
                with suppress(StreamMissing):  # the answer to the first try may be lost
                    await when_ready(bus, partial(api, bus, f"STREAM.DELETE.{name}"))
            await asyncio.gather(*(TopologyKeeper(each, settings).start() for each in starting))
            assert await when_ready(bus, lambda: drift(bus, settings)) == []


async def test_a_stream_in_memory_of_which_most_copies_are_gone_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unique: str
) -> None:
    """Of five servers three hold the cards, and two of those die: three agree on all else, and what is on disk waits for the dead."""
    monkeypatch.setattr(topology_keeper, "LEADERLESS_S", 2.0)
    for name in ("LOOK_EVERY_S", "LOOK_FOR_LEADERS_EVERY_S"):
        monkeypatch.setattr(topology_keeper, name, 0.5)
    cards, on_disk = bucket_stream(WORKERS_BUCKET.name), [spec.name for spec in STREAMS if spec.storage == "file"]
    async with NatsCluster(tmp_path, 5, sync_always=False) as cluster:
        await wait_until_agreed(BrokerSettings(url=cluster.url))
        async with Bus.connect(BrokerSettings(url=cluster.url), "test") as bus, asyncio.TaskGroup() as tasks:
            keeper = TopologyKeeper(bus, TopologySettings(replicas=3))
            await keeper.start()
            assert await wait_until_whole(bus, 30) == []
            made = {name: await stream_created_ns(bus, name) for name in [cards, *on_disk]}
            copies = [replica["name"] for replica in (await api(bus, f"STREAM.INFO.{cards}"))["cluster"]["replicas"]]
            dead = [server for server in cluster.servers if server.store_dir.name in copies]
            running = tasks.create_task(keeper.run())
            for server in dead:
                await server.kill()
            async with asyncio.timeout(60):
                while not await is_stored(bus, unique):
                    await asyncio.sleep(0.1)
            for server in dead:
                await server.start()
            assert await wait_until_whole(bus, 60) == []
            running.cancel()
            again = {name: await stream_created_ns(bus, name) for name in [cards, *on_disk]}
            assert [name for name in made if again[name] != made[name]] == [cards]


async def is_stored(bus: Bus, key: str) -> bool:
    try:
        await Publisher(bus).store_bytes(f"$KV.{WORKERS_BUCKET.name}.{key}", b"{}")
    except BusError:
        return False
    return True
