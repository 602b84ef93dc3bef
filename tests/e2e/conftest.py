"""Fleets for the end-to-end tests; with `--secured` on brokers that know users, where every part has the permissions of its role."""

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from jetwake.deploy.nats_server import NatsServer
from jetwake.deploy.nats_users import ACCOUNTS_FILE, users_of, write_users
from jetwake.pipeline import catalogue, topology_keeper
from jetwake.pipeline.connection import Bus
from jetwake.pipeline.settings import BrokerSettings, TopologySettings
from jetwake.pipeline.topology import ensure_topology
from jetwake.producers import takeover

sys.path.insert(0, str(Path(__file__).parent))  # `fleet` is a helper of this folder, under importlib's import mode

TEST_USER = "{user: test, password: test, permissions: {publish: [>], subscribe: [>]}}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--secured", action="store_true", help="with `pytest tests/e2e`: routers and workers have the permissions of their roles"
    )


@pytest.fixture(autouse=True)
def frequent_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What these parts look for now and then, because nobody tells of it, they find sooner here. What they do about it is the same.

    No broker starts together with these routers: they may look for queues of dead workers soon after their start.
    """
    monkeypatch.setattr(takeover, "FIRST_SWEEP_AFTER_S", 0.5)
    for module, name in ((takeover, "SWEEP_EVERY_S"), (topology_keeper, "LOOK_EVERY_S"), (catalogue, "LOOK_EVERY_S")):
        monkeypatch.setattr(module, name, 0.25)


@pytest.fixture(scope="session")
def accounts(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> str:
    """More configuration of every broker. Tests say who they are by saying nothing, and may do everything."""
    if not pytestconfig.getoption("--secured", default=False):
        return ""
    from fleet import Fleet

    Fleet.users = folder = tmp_path_factory.mktemp("users")
    write_users(folder, users_of([], [], []), [], {})
    text = (folder / ACCOUNTS_FILE).read_text()
    return text.replace("users: [", f"users: [\n      {TEST_USER}", 1) + "no_auth_user: test\n"


@pytest.fixture(scope="session")
async def nats_server(accounts: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[NatsServer]:
    async with NatsServer(tmp_path_factory.mktemp("nats"), sync_always=False, extra_config=accounts) as server:
        await declared(server)
        yield server


@pytest.fixture
async def own_server(accounts: str, tmp_path: Path) -> AsyncIterator[NatsServer]:
    async with NatsServer(tmp_path / "nats", sync_always=False, extra_config=accounts) as server:
        await declared(server)
        yield server


async def declared(server: NatsServer) -> None:
    async with Bus.connect(BrokerSettings(url=server.url), "topology") as bus:
        await ensure_topology(bus, TopologySettings())
