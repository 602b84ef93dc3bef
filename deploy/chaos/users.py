"""The users of a chaos run's broker: open to everybody who reaches it, or as `jetwake nats` makes one that lets in its users alone, over TLS.

Writes the files of `nats_users` and `certificates` into a folder. Promises: every process and client of a run connects as its own
user, with the permissions of its role; whoever looks from outside is the admin.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from ...pipeline.connection import Bus
from ...pipeline.permissions import Role
from ...pipeline.refusals import FORBIDDEN
from ...pipeline.settings import BrokerSettings, TopologySettings
from ..certificates import client_files, write_certificates
from ..local import URL_VARIABLE
from ..nats_config import ServerTls
from ..nats_declare import declare_all
from ..nats_folder import tls_of
from ..nats_users import ACCOUNTS_FILE, User, broker_settings, common_environment, settings_of, users_of, write_users

DAYS = 30


class OpenBroker:
    """Everybody may do everything."""

    def __init__(self) -> None:
        self.server_options: dict[str, Any] = {}
        self.tls: ServerTls | None = None

    def settings(self, role: Role, name: str, url: str) -> BrokerSettings:
        return BrokerSettings(url=url)

    def environment(self, role: Role, url: str) -> dict[str, str]:
        """Of a process of that role."""
        return {URL_VARIABLE: url}

    async def declare(self, url: str, replicas: int, model: str) -> None:
        """What its processes may not make themselves."""


class SecuredBroker(OpenBroker):
    """`folder` is made. `clients`: their names."""

    def __init__(self, folder: Path, clients: Sequence[str]) -> None:
        super().__init__()
        write_certificates(folder, ["127.0.0.1"], DAYS)
        write_users(folder, users_of([], clients, []), [], {})
        self._folder = folder
        self.tls = tls_of(folder, folder)
        self.server_options = {"tls": self.tls, "extra_config": (folder / ACCOUNTS_FILE).read_text()}

    def settings(self, role: Role, name: str, url: str) -> BrokerSettings:
        return broker_settings(self._folder, User(role, name), url)

    def environment(self, role: Role, url: str) -> dict[str, str]:
        user = User(role)
        return common_environment(url, client_files(self._folder)) | settings_of(user, user.file(self._folder, "nk"))

    async def declare(self, url: str, replicas: int, model: str) -> None:
        async with Bus.connect(self.settings("admin", "", url), "admin") as bus:
            await declare_all(bus, TopologySettings(replicas=replicas), [model])


def role_of(command: str) -> Role:
    """Of the process that this command starts."""
    [role] = [role for role in get_args(Role) if role == command]
    return role


def refusals(logs: Path) -> list[str]:
    """What the broker's permissions forbade somebody: nothing, where each has the rights of its role."""
    lines = [(log.stem, line) for log in sorted(logs.glob("*.log")) for line in log.read_text(errors="replace").splitlines()]
    refused = Counter((name, line.partition(FORBIDDEN)[2]) for name, line in lines if FORBIDDEN in line)
    return [f"refused to {name}, {count} times:{what}" for (name, what), count in refused.items()]
