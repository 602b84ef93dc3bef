"""Shared fixtures: a real nats-server for the whole run, and connections to it. Each test names its own models, workers and gateways."""

import logging
import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from jetwake.deploy.nats_server import NatsServer
from jetwake.pipeline.connection import Bus
from jetwake.pipeline.publish import Publisher
from jetwake.pipeline.settings import BrokerSettings, TopologySettings
from jetwake.pipeline.topology import ensure_topology


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """A command that runs within a test sets the level of its whole process, and a later test would wait in vain for a warning."""
    root = logging.getLogger()
    level = root.level
    yield
    root.setLevel(level)


@pytest.fixture(scope="session")
async def nats_server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[NatsServer]:
    """Shared by all tests that do not restart it. Syncing to disk is left out: no test pulls the plug."""
    async with NatsServer(tmp_path_factory.mktemp("nats"), sync_always=False) as server:
        async with Bus.connect(BrokerSettings(url=server.url), "topology") as bus:
            await ensure_topology(bus, TopologySettings())
        yield server


@pytest.fixture
async def own_server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    """For one test alone, which may stop, restart and empty it. It has the declared topology."""
    async with NatsServer(tmp_path / "nats", sync_always=False) as server:
        async with Bus.connect(BrokerSettings(url=server.url), "topology") as bus:
            await ensure_topology(bus, TopologySettings())
        yield server


@pytest.fixture
async def bus(nats_server: NatsServer) -> AsyncIterator[Bus]:
    async with Bus.connect(BrokerSettings(url=nats_server.url), "test") as bus:
        yield bus


@pytest.fixture
def publisher(bus: Bus) -> Publisher:
    return Publisher(bus)


@pytest.fixture
def unique() -> str:
    """A name no other test uses: for workers, gateways, models and requests on the shared server."""
    return "t" + secrets.token_hex(5)
