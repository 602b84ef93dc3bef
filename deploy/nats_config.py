"""The configuration of a nats-server as Jetwake wants it: one text for the embedded broker, for tests, and for whoever runs their own. Pure."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MAX_PAYLOAD_BYTES = 8 << 20
"""For long prompts, and answers with log probabilities."""


@dataclass(frozen=True)
class ServerTls:
    """PEM files. `verify_clients`: who has no certificate of this authority is turned away before it can say who it is."""

    ca_file: Path
    cert_file: Path
    key_file: Path
    verify_clients: bool = True

    def block(self, *, verify: bool) -> str:
        files = {"ca_file": self.ca_file, "cert_file": self.cert_file, "key_file": self.key_file}
        lines = "".join(f"  {name}: {_quoted(path)}\n" for name, path in files.items())
        return f"tls {{\n{lines}  verify: {str(verify).lower()}\n}}\n"


@dataclass(frozen=True)
class ClusterPlace:
    """One server's place in a cluster. `listen` and `routes` are `host:port`; its own may be among the routes."""

    cluster: str
    server: str
    listen: str
    routes: Sequence[str]


def server_config(
    listen: str,
    store_dir: Path,
    *,
    sync_always: bool = True,
    max_payload_bytes: int = MAX_PAYLOAD_BYTES,
    tls: ServerTls | None = None,
    cluster: ClusterPlace | None = None,
    more: str = "",
) -> str:
    """`listen`: `host:port`. `sync_always`: accepted work survives a power cut, at 4,300 stores/s; `more`: the end of the text, as it is."""
    sync = "  sync_interval: always\n" if sync_always else ""
    return (
        f"listen: {json.dumps(listen)}\n"
        f"max_payload: {max_payload_bytes}\n"
        "jetstream {\n"
        f"  store_dir: {_quoted(store_dir)}\n"
        "  max_file_store: 64GB\n"  # a bound for reservations, not a reservation; the default depends on the free disk of the day
        "  max_memory_store: 2GB\n"
        "  max_buffered_msgs: 500000\n"
        "  max_buffered_size: 512MB\n"
        f"{sync}"
        "}\n"
        f"{tls.block(verify=tls.verify_clients) if tls else ''}"
        f"{_cluster_block(cluster, tls) if cluster else ''}"
        f"{more}\n"
    )


def _cluster_block(place: ClusterPlace, tls: ServerTls | None) -> str:
    """Servers show each other certificates whatever clients must. Addresses are not told to clients: they have them all, by name."""
    routes = "".join(f"    {json.dumps(f'nats://{route}')}\n" for route in place.routes)
    inner = "".join(f"  {line}\n" for line in tls.block(verify=True).splitlines()) if tls else ""
    return (
        f"server_name: {place.server}\n"
        "cluster {\n"
        f"  name: {place.cluster}\n"
        f"  listen: {json.dumps(place.listen)}\n"
        "  no_advertise: true\n"
        f"  routes: [\n{routes}  ]\n"
        f"{inner}"
        "}\n"
    )


def _quoted(path: Path) -> str:
    return '"' + str(path).replace("\\", "\\\\").replace('"', '\\"') + '"'
