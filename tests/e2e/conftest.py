"""Fleets for the end-to-end tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # `fleet` is a helper of this folder, under importlib's import mode
