"""Who is alive: seen at once, gone after the card's life, and nobody dead only because the broker was away."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from jetwake.deploy.nats_server import NatsServer
from jetwake.pipeline.connection import Bus
from jetwake.pipeline.jetstream import MARKER_REASON_HEADER, key_subject
from jetwake.pipeline.publish import Publisher
from jetwake.pipeline.registry import CARD_TTL_S, CardKeeper, ModelCatalogue, Registry
from jetwake.pipeline.settings import BrokerSettings, TopologySettings
from jetwake.pipeline.topology import ensure_topology
from jetwake.schemas.errors import NoWorker
from jetwake.schemas.streams import WORKERS_BUCKET
from jetwake.schemas.workers import KvCompatibility, ModelCard, WorkerCard

COMPATIBILITY = KvCompatibility(
    engine="simulated", engine_version="1", nixl_version="1", model="tiny", revision="", dtype="f32", kv_dtype="f32",
    block_size_tokens=16, tensor_parallel=1,
)  # fmt: skip


def card(worker: str, incarnation: str = "i1", slots: int = 4) -> WorkerCard:
    return WorkerCard(
        worker=worker, incarnation=incarnation, role="prefill", model="tiny", pool="p", compatibility=COMPATIBILITY,
        capacity_blocks=10, capacity_slots=slots, max_model_len_tokens=100,
    )  # fmt: skip


@asynccontextmanager
async def running(*loops: CardKeeper | Registry) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(loop.run()) for loop in loops]
        yield
        for task in tasks:
            task.cancel()


async def started(bus: Bus) -> Registry:
    registry = Registry(bus)
    await registry.start()
    return registry


async def test_a_card_is_seen_changed_and_withdrawn(bus: Bus, publisher: Publisher, unique: str) -> None:
    registry, keeper = await started(bus), CardKeeper(bus, publisher)
    news: list[int] = []
    registry.on_change(lambda: news.append(len(registry.workers)))
    await keeper.announce(card(unique))
    await registry.wait_for(lambda workers: unique in workers, 5)
    await keeper.update(card(unique, slots=5))
    await registry.wait_for(lambda workers: workers[unique].capacity_slots == 5, 5)
    await keeper.announce(card(unique, slots=5))
    await keeper.withdraw()
    await registry.wait_for(lambda workers: unique not in workers, 1)
    assert len(news) >= 3


async def test_a_registry_that_starts_later_knows_who_is_there(bus: Bus, publisher: Publisher, unique: str) -> None:
    await CardKeeper(bus, publisher).announce(card(unique))
    assert (await started(bus)).workers[unique] == card(unique)


async def test_a_worker_that_renews_stays_and_one_that_stops_goes(bus: Bus, publisher: Publisher, unique: str) -> None:
    alive, dead = f"{unique}-alive", f"{unique}-dead"
    registry, keeper = await started(bus), CardKeeper(bus, publisher)
    before_s = time.monotonic()
    await CardKeeper(bus, publisher).announce(card(dead))
    await keeper.announce(card(alive))
    async with running(registry, keeper):
        await registry.wait_for(lambda workers: {alive, dead} <= set(workers), 5)
        await registry.wait_for(lambda workers: dead not in workers, 30)
        assert time.monotonic() - before_s > CARD_TTL_S - 0.5  # not sooner; how much later depends on the machine
        assert alive in registry.workers
    await keeper.withdraw()


async def test_an_incarnation_takes_the_place_of_the_one_before(bus: Bus, publisher: Publisher, unique: str) -> None:
    registry = await started(bus)
    await CardKeeper(bus, publisher).announce(card(unique, "i1"))
    await CardKeeper(bus, publisher).announce(card(unique, "i2"))
    await registry.wait_for(lambda workers: workers.get(unique) == card(unique, "i2"), 5)


async def test_waiting_for_nobody_ends(bus: Bus) -> None:
    with pytest.raises(NoWorker):
        await (await started(bus)).wait_for(lambda _: False, 0.1)


@pytest.mark.parametrize("empty_store", [False, True])
async def test_nobody_is_dead_because_the_broker_was_away(own_server: NatsServer, empty_store: bool) -> None:
    settings = BrokerSettings(url=own_server.url)
    async with Bus.connect(settings, "worker") as worker_bus, Bus.connect(settings, "router") as router_bus:
        worker_bus.on_reconnect(lambda: _declare(worker_bus))
        keeper, registry = CardKeeper(worker_bus, Publisher(worker_bus)), await started(router_bus)
        await keeper.announce(card("w1"))
        await registry.wait_for(lambda workers: "w1" in workers, 5)
        views: list[set[str]] = []
        registry.on_change(lambda: views.append(set(registry.workers)))
        async with running(keeper, registry):
            await own_server.stop()
            await asyncio.sleep(CARD_TTL_S + 1)
            if empty_store:
                await own_server.restart(empty_store=True)
            else:
                await own_server.start()
            await router_bus.wait_connected()
            await asyncio.sleep(CARD_TTL_S + 4)
            assert views == []
            assert "w1" in registry.workers


async def test_who_died_during_the_outage_is_noticed_after_it(own_server: NatsServer) -> None:
    settings = BrokerSettings(url=own_server.url)
    async with Bus.connect(settings, "router") as bus:
        bus.on_reconnect(lambda: _declare(bus))
        registry = await started(bus)
        await CardKeeper(bus, Publisher(bus)).announce(card("w1"))
        await registry.wait_for(lambda workers: "w1" in workers, 5)
        async with running(registry):
            await own_server.restart()
            await bus.wait_connected()
            await asyncio.sleep(CARD_TTL_S)
            assert "w1" in registry.workers
            await registry.wait_for(lambda workers: not workers, 6)


async def _declare(bus: Bus) -> None:
    await ensure_topology(bus, TopologySettings())


async def test_models_stay_when_workers_go(bus: Bus, publisher: Publisher, unique: str) -> None:
    catalogue = ModelCatalogue(bus, publisher)
    model = ModelCard(model=f"org/{unique}", source="x", vocabulary_size=9, max_model_len_tokens=9, block_size_tokens=16)
    assert await catalogue.get(model.model) is None
    await catalogue.put(model)
    assert await catalogue.get(model.model) == model
    assert model in await catalogue.all()


async def test_a_card_whose_renewals_could_not_be_stored_is_no_death(bus: Bus, publisher: Publisher, unique: str) -> None:
    """A cluster without a leader of the bucket lets a card expire though its worker renews it, and everybody heard that."""
    registry = await started(bus)
    await CardKeeper(bus, publisher).announce(card(unique))
    await registry.wait_for(lambda workers: unique in workers, 5)
    seen: list[bool] = []
    registry.on_change(lambda: seen.append(unique in registry.workers))
    await bus.publish(key_subject(WORKERS_BUCKET.name, unique), b"", {MARKER_REASON_HEADER: "MaxAge"})
    await CardKeeper(bus, publisher).announce(card(unique, slots=5))
    await registry.wait_for(lambda workers: unique in workers and workers[unique].capacity_slots == 5, 5)
    assert all(seen)
