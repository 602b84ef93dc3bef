"""Fleets for the end-to-end tests."""

import sys
from pathlib import Path

import pytest

from jetwake.producers import takeover

sys.path.insert(0, str(Path(__file__).parent))  # `fleet` is a helper of this folder, under importlib's import mode


@pytest.fixture(autouse=True)
def early_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """No broker starts together with these routers: they may look for queues of dead workers soon after their start."""
    monkeypatch.setattr(takeover, "FIRST_SWEEP_AFTER_S", 0.5)
