"""vLLM keeps the engine contract: the shared suite on a pair of real engines."""

import pytest

from .conformance import EngineConformance, Pair
from .vllm_engines import tiny_model, vllm_pair  # noqa: F401  (fixtures)

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def pair(vllm_pair: Pair) -> Pair:  # noqa: F811
    return vllm_pair


class TestConformance(EngineConformance):
    concurrency = 16
    # Sums in another order differ in their last bits; the tiny model's margins are wide, not infinite.
    exact_when_batched = False
