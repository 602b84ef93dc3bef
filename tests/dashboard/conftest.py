"""The live page: pure parts, and a real browser on a real system of simulated engines."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # helpers of this folder, under importlib's import mode
for folder in ("e2e", "gateway"):  # `fleet`, `gateway_system`
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))
