"""Whether a gateway may listen where it was told to. Pure."""

import ipaddress

from ...schemas.errors import SetupError


def refuse_open(host: str, *, guarded: bool, allow_open: bool) -> None:
    """Raises SetupError when others than this machine could ask without a key, and nobody said that they may."""
    if guarded or allow_open or is_loopback(host):
        return
    raise SetupError(
        f"anybody who reaches {host} could use this gateway: give keys (--api-keys FILE, or `jetwake keys add TENANT`), or say --allow-open"
    )


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
