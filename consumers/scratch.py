"""Temporary folders that do not stay behind for good, even when their process is killed.

Each folder holds a file that its process keeps locked; the kernel drops the lock with the process. Whoever makes a folder next
removes those of the same kind, of the same user, that nobody has locked.
"""

import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

LOCK = ".lock"
YOUNG_S = 60.0
"""A folder without its lock file is one that is just being made, unless it is older than this."""


class ScratchFolder:
    """`prefix` names the kind. `remove` at the end; safe to call twice."""

    def __init__(self, prefix: str) -> None:
        remove_abandoned(prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        self._lock = os.open(self.path / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def remove_abandoned(prefix: str) -> list[Path]:
    """Those it removed."""
    folders = [folder for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*") if folder.is_dir() and not folder.is_symlink()]
    abandoned = [folder for folder in folders if _is_abandoned(folder)]
    for folder in abandoned:
        shutil.rmtree(folder, ignore_errors=True)
    return abandoned


def _is_abandoned(folder: Path) -> bool:
    try:
        if folder.stat().st_uid != os.getuid():
            return False
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return _age_s(folder) > YOUNG_S
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True


def _age_s(folder: Path) -> float:
    try:
        return time.time() - folder.stat().st_mtime
    except FileNotFoundError:
        return 0.0
