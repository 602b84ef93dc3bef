"""Traces and fleets for the tests of capacity planning."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # `traces`, under importlib's import mode
sys.path.insert(0, str(Path(__file__).parent.parent / "e2e"))  # `fleet`
