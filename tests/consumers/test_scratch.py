"""Folders of processes that were killed do not stay for good."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from jetwake.consumers.scratch import ScratchFolder, remove_abandoned

KILLED = """
import os, signal
from jetwake.consumers.scratch import ScratchFolder
print(ScratchFolder("jw-test-").path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def own_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


def test_what_a_killed_process_left_goes_with_the_next_folder_of_its_kind() -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, timeout=60, check=False)
    left = Path(killed.stdout.strip())
    assert left.is_dir()
    mine = ScratchFolder("jw-test-")
    assert not left.exists()
    assert mine.path.is_dir()
    mine.remove()
    mine.remove()
    assert not mine.path.exists()


def test_what_is_in_use_stays_and_so_do_others_folders() -> None:
    used, other = ScratchFolder("jw-test-"), ScratchFolder("jw-other-")
    just_made = Path(tempfile.mkdtemp(prefix="jw-test-"))
    assert remove_abandoned("jw-test-") == []
    assert used.path.is_dir()
    assert other.path.is_dir()
    assert just_made.is_dir()
