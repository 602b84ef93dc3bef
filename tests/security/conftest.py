"""A broker that lets in only the users that `jetwake nats` wrote, over TLS, with streams declared by its admin."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from jetwake.deploy.certificates import client_files, write_certificates
from jetwake.deploy.nats_declare import declare_all
from jetwake.deploy.nats_folder import tls_of
from jetwake.deploy.nats_server import NatsServer
from jetwake.deploy.nats_users import ACCOUNTS_FILE, User, broker_settings, common_environment, users_of, write_users
from jetwake.pipeline.connection import Bus
from jetwake.pipeline.permissions import Role
from jetwake.pipeline.settings import BrokerSettings, TopologySettings

MODEL = "secured"


@dataclass(frozen=True)
class Secured:
    """`url`: of the broker. `folder` has the files of its users."""

    folder: Path
    url: str

    def settings(self, role: Role, name: str = "") -> BrokerSettings:
        return broker_settings(self.folder, User(role, name), self.url)


def folder_of_users(folder: Path) -> None:
    write_certificates(folder, ["127.0.0.1"], days=2)
    users = users_of(["gateway-1", "gateway-2"], ["alice", "bob"], ["acme", "globex"])
    write_users(folder, users, ["docs.>"], common_environment("", client_files(folder)))


@pytest.fixture(scope="session")
async def secured(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Secured]:
    folder = tmp_path_factory.mktemp("secured")
    folder_of_users(folder)
    accounts = (folder / ACCOUNTS_FILE).read_text()
    async with NatsServer(folder / "broker", sync_always=False, tls=tls_of(folder, folder), extra_config=accounts) as server:
        made = Secured(folder, server.url)
        async with Bus.connect(made.settings("admin"), "admin") as bus:
            await declare_all(bus, TopologySettings(), [MODEL])
        yield made
