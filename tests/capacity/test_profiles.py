"""Rooflines against figures worked out by hand; files; what a name means."""

import json
from pathlib import Path

import pytest

from jetwake.consumers.roofline import Efficiency, Gpu, ModelShape, RooflineTiming
from jetwake.consumers.timing import DYNAMO_DEFAULT, FittedTiming, ScaledTiming
from jetwake.deploy.capacity.profile_file import FittedProfile, write_profile
from jetwake.deploy.capacity.profiles import MODELS, profile_named
from jetwake.schemas.errors import SetupError

# 1,000,000 parameters, of which the embedding and the head have 100,000 each.
MODEL = ModelShape(1_000_000, layers=2, hidden_size=100, attention_heads=4, kv_heads=2, head_dim=25, vocabulary_size=1000)
GPU = Gpu(10_000_000, memory_bytes_per_s=1e9, bf16_flop_per_s=1e12, fp8_flop_per_s=2e12, link_bytes_per_s=1e9, network_bytes_per_s=1e8)
PERFECT = Efficiency(matmul=1, attention=1, memory=1, link=1, step_s=0, allreduce_s=0)


def test_a_long_prefill_is_arithmetic() -> None:
    """10,000 tokens: 2 x 800,000 x 10,000 for the layers, 2 x 100,000 for the one drawn, 4 x 2 x 4 x 25 x 10,000 x 5,000.5 for attention."""
    timing = RooflineTiming(MODEL, GPU, efficiency=PERFECT)
    assert timing.prefill_s(10_000, 0) == pytest.approx((1.6e10 + 2e5 + 800 * 10_000 * 5000.5) / 1e12)


def test_what_is_cached_is_only_attended_to() -> None:
    timing = RooflineTiming(MODEL, GPU, efficiency=PERFECT)
    more_s = timing.prefill_s(10_000, 5000) - timing.prefill_s(10_000, 0)
    assert more_s == pytest.approx(800 * 10_000 * 5000 / 1e12)


def test_decode_is_memory_traffic() -> None:
    """1.8 MB of weights without the embedding (2 bytes each), and 400 bytes for each of 5,000 tokens: 3.8 ms at 1 GB/s."""
    timing = RooflineTiming(MODEL, GPU, efficiency=PERFECT)
    assert timing.kv_bytes_per_token == 2 * 2 * 2 * 25 * 2
    assert timing.decode_step_s(3, 0.5, 5000) == pytest.approx(1.8e-3 + 400 * 5000 / 1e9)


def test_a_mixed_step_reads_the_weights_once() -> None:
    timing = RooflineTiming(MODEL, GPU, efficiency=PERFECT)
    assert timing.mixed_step_s(1, 0, 1, 0.0, 0) < timing.prefill_s(1, 0) + timing.decode_step_s(1, 0.0, 0) - 1.7e-3


def test_efficiency_and_what_a_step_costs() -> None:
    slow = RooflineTiming(MODEL, GPU, efficiency=Efficiency(1, 1, memory=0.5, link=1, step_s=0.01, allreduce_s=0))
    assert slow.decode_step_s(3, 0.5, 5000) == pytest.approx(0.01 + 2 * 3.8e-3)


def test_more_gpus_share_the_work_and_exchange() -> None:
    """Four all-reduces of 3 tokens x 100 x 2 bytes; in a ring of two each GPU sends them once: 2.4 us at 1 GB/s, and 4 x 1 us latency."""
    two = RooflineTiming(MODEL, GPU, tensor_parallel=2, efficiency=Efficiency(1, 1, 1, 1, 0, allreduce_s=1e-6))
    assert two.decode_step_s(3, 0.5, 5000) == pytest.approx(3.8e-3 / 2 + 4 * (1e-6 + 600 / 1e9))


def test_what_fits() -> None:
    """9 MB usable less 1 MB reserved less 2 MB of weights, 400 bytes a token."""
    timing = RooflineTiming(MODEL, GPU, efficiency=PERFECT)
    assert timing.kv_capacity_tokens(0.9, 1e6) == (9_000_000 - 1_000_000 - 2_000_000) // 400
    with pytest.raises(SetupError, match="more than 1 GPU"):
        timing.kv_capacity_tokens(0.2, 1e6)


def test_published_sizes() -> None:
    """KV bytes per token from the models' configurations; parameters as on their model cards."""
    sizes = {name: (round(model.parameters / 1e9, 1), model.kv_bytes_per_token("bf16")) for name, model in MODELS.items()}
    assert sizes == {"qwen3-32b": (32.8, 262_144), "qwen3-8b": (8.2, 147_456), "llama-3.1-8b": (8.0, 131_072)}


def test_names() -> None:
    h100, h200 = profile_named("qwen3-32b@h100"), profile_named("qwen3-32b-fp8@h200x2")
    assert (h100.gpus_per_worker, h200.gpus_per_worker) == (1, 2)
    assert h100.timing.decode_step_s(8, 0.1, 1000) > 65.5e9 / 3.35e12  # the weights alone
    assert h200.timing.decode_step_s(8, 0.1, 1000) < h100.timing.decode_step_s(8, 0.1, 1000) / 2
    assert h200.kv_capacity_tokens > 10 * h100.kv_capacity_tokens
    assert h100.blocks(64) == h100.kv_capacity_tokens // 64
    with pytest.raises(SetupError, match="qwen3-8b@h100"):
        profile_named("qwen3-8b@a100")
    with pytest.raises(SetupError, match="--blocks a number"):
        profile_named("dynamo-default").blocks(64)


def test_a_fit_is_written_and_read_back(tmp_path: Path) -> None:
    fitted = FittedProfile(
        name="mine",
        prefill_step_s=0.01,
        prefill_token_s=1e-3,
        prefill_pair_s=1e-6,
        decode_step_base_s=0.02,
        decode_sequence_s=1e-3,
        decode_context_token_s=1e-6,
        kv_capacity_tokens=1000,
    )
    write_profile(tmp_path / "mine.json", fitted)
    profile = profile_named(str(tmp_path / "mine.json"))
    assert (profile.name, profile.blocks(16), profile.timing) == ("mine", 62, FittedTiming(0.01, 1e-3, 1e-6, 0.02, 1e-3, 1e-6))
    assert profile.timing.prefill_s(100, 50) == pytest.approx(0.01 + 0.1 + 1e-6 * 100 * (50 + 50.5))
    assert profile.timing.decode_step_s(4, 0.0, 200) == pytest.approx(0.02 + 0.004 + 0.0002)
    assert profile.timing.mixed_step_s(100, 50, 4, 0.0, 200) == pytest.approx(0.1 + 1e-6 * 100 * (50 + 50.5) + 0.02 + 0.004 + 0.0002)


def test_a_roofline_file(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    path.write_text(json.dumps({"kind": "roofline", "model": "qwen3-8b", "gpu": "h100", "efficiency": {"memory": 0.4}}))
    own, known = profile_named(str(path)), profile_named("qwen3-8b@h100")
    assert (own.name, own.kv_capacity_tokens) == ("own", known.kv_capacity_tokens)
    assert own.timing.decode_step_s(1, 0, 0) - 0.001 == pytest.approx(2 * (known.timing.decode_step_s(1, 0, 0) - 0.001))
    path.write_text(json.dumps({"kind": "roofline", "model": "qwen3-8b", "gpu": "h100", "tensor_paralell": 2}))
    with pytest.raises(SetupError, match="tensor_paralell"):
        profile_named(str(path))


def test_speed() -> None:
    twice = ScaledTiming(DYNAMO_DEFAULT, 2)
    assert twice.prefill_s(1000, 0) == pytest.approx(DYNAMO_DEFAULT.prefill_s(1000, 0) / 2)
    assert twice.mixed_step_s(10, 0, 2, 0.5, 9) == pytest.approx(
        (DYNAMO_DEFAULT.prefill_s(10, 0) + DYNAMO_DEFAULT.decode_step_s(2, 0.5, 9)) / 2
    )
