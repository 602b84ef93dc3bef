"""The folder that `jetwake nats` keeps: users, certificates, and configurations of servers made of what is there."""

from pathlib import Path

from ..schemas.errors import SetupError
from .certificates import AUTHORITY, SERVER, certificate_file, key_file
from .nats_config import ClusterPlace, ServerTls, server_config
from .nats_users import ACCOUNTS_FILE


def tls_of(folder: Path, at: Path) -> ServerTls | None:
    """With the certificates in `folder`, by their paths under `at`."""
    if not certificate_file(folder, SERVER).exists():
        return None
    return ServerTls(certificate_file(at, AUTHORITY), certificate_file(at, SERVER), key_file(at, SERVER))


def write_config(folder: Path, at: Path, listen: str, store: Path, place: ClusterPlace | None, *, sync_always: bool) -> Path:
    """Raises SetupError when there is neither a user nor a certificate yet: such a server would be open to everybody."""
    tls = tls_of(folder, at)
    has_accounts = (folder / ACCOUNTS_FILE).exists()
    if not has_accounts and tls is None:
        raise SetupError(f"{folder} has no users and no certificates: `jetwake nats permissions {folder}` first")
    path = folder / f"{place.server if place else 'nats-server'}.conf"
    more = f'include "{ACCOUNTS_FILE}"' if has_accounts else ""  # beside this file, whatever the folder is called there
    path.write_text(server_config(listen, store, sync_always=sync_always, tls=tls, cluster=place, more=more))
    return path
