"""vLLM keeps the engine contract: the shared suites on a pair of real engines."""

import pytest

from .conformance import EngineConformance, EngineLifeConformance, Pair
from .vllm_engines import pair, tiny_model, vllm_pair  # noqa: F401  (fixtures)

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


class TestConformance(EngineConformance):
    concurrency = 16
    # Sums in another order differ in their last bits; the tiny model's margins are wide, not infinite.
    exact_when_batched = False


class TestLife(EngineLifeConformance):
    @pytest.fixture
    def mortal_pair(self, pair: Pair) -> Pair:  # noqa: F811
        """Whatever a test stops is replaced for the next one."""
        return pair
