# nkeys has no types:
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
"""NKeys: the key pairs by which the broker knows its users. The seed is the secret, and stays in its file; the public key goes to the broker.

Reads and writes seed files. Promises: a seed file is made with mode 0600 and never overwritten; one that others could read is refused;
no text of an error has a seed in it.
"""

import os
import secrets
import stat
from pathlib import Path
from typing import Any, cast

import nkeys

from ..schemas.errors import SetupError


def new_seed_file(path: Path) -> str:
    """Makes a user's key pair; its public key. Raises SetupError when the file is there."""
    seed: bytes = nkeys.encode_seed(secrets.token_bytes(32), nkeys.PREFIX_BYTE_USER)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise SetupError(f"the seed file {path} cannot be written: {error.strerror}") from error
    with os.fdopen(descriptor, "wb") as file:
        file.write(seed + b"\n")
    return public_key(path)


def public_key(path: Path) -> str:
    """Of the seed in this file. Raises SetupError."""
    try:
        pair = nkeys.from_seed(bytearray(path.read_bytes().strip()))
        key = bytes(cast(Any, pair).public_key)
        pair.wipe()
    except (OSError, nkeys.NkeysError, ValueError) as error:
        raise SetupError(f"{path} holds no seed of a user (a line that begins with SU): {type(error).__name__}") from None
    if not key.startswith(b"U"):
        raise SetupError(f"{path} holds the seed of something else than a user: it must begin with SU")
    return key.decode()


def check_seed_file(path: Path) -> None:
    """Raises SetupError for one that is missing, open to others, or no seed."""
    if not path.is_file():
        raise SetupError(f"NKey file {path} does not exist")
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & (stat.S_IWGRP | stat.S_IRWXO):
        raise SetupError(f"NKey file {path} can be read or changed by others (mode {mode:o}): chmod 600 {path}")
    public_key(path)
