"""What this machine calls itself: for containers, of which many are started with one and the same command line."""

import re
import socket

from ..schemas.errors import SetupError

AUTO = "auto"
LONGEST_NAME = 64


def name_of(given: str, role: str) -> str:
    """`auto` is the role and this machine's name, which in a container is the container's own. Pure but for that name."""
    if given != AUTO:
        return given
    return re.sub(r"[^A-Za-z0-9_-]", "-", f"{role}-{socket.gethostname()}")[:LONGEST_NAME]


def own_address() -> str:
    """The address that this machine's name stands for: in a container, the one that others reach it by. Raises SetupError."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        raise SetupError(
            f"side_channel_host=auto: this machine's name {name!r} has no address ({error}); give the address itself"
        ) from error
    if address.startswith("127."):
        raise SetupError(
            f"side_channel_host=auto: this machine's name {name!r} is {address}, which no other reaches; give its address itself"
        )
    return address
