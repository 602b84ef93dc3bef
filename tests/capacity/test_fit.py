"""Fits find what made the measurements; a system's own timing is found through the client."""

import json
import math
import random
from pathlib import Path

import pytest
from fleet import fleet_of
from typer.testing import CliRunner

from jetwake.consumers.timing import DYNAMO_DEFAULT, FittedTiming
from jetwake.deploy.capacity.fit import DecodePoint, PrefillPoint, fit
from jetwake.deploy.capacity.profile_file import write_profile
from jetwake.deploy.capacity.profiles import profile_named
from jetwake.deploy.cli import app
from jetwake.deploy.measure_profile import AnswerStream, ProfilePlan, decode_point, measure_profile
from jetwake.deploy.nats_server import NatsServer
from jetwake.pipeline.settings import BrokerSettings
from jetwake.schemas.errors import SetupError
from jetwake.schemas.workers import ModelCard

TRUE = FittedTiming(0.02, 1e-4, 1e-8, 0.01, 5e-4, 1e-7)
PREFILLS = [(64, 0), (512, 0), (2048, 0), (8192, 0), (1024, 1024), (512, 4096)]
DECODES = [(1, 100), (4, 400), (8, 20_000), (16, 1000), (1, 8000), (8, 60_000)]


def prefills(noise: float = 0.0, seed: int = 0) -> list[PrefillPoint]:
    jitter = random.Random(seed)
    return [PrefillPoint(new, known, TRUE.prefill_s(new, known) * (1 + jitter.uniform(-noise, noise))) for new, known in PREFILLS]


def test_exact_measurements_give_back_their_timing() -> None:
    found = fit(prefills())
    assert found.coefficients == pytest.approx((TRUE.prefill_step_s, TRUE.prefill_token_s, TRUE.prefill_pair_s))
    assert (found.quality.r2, found.quality.mape) == (1.0, 0.0)
    found = fit([DecodePoint(batch, context, TRUE.decode_step_s(batch, 0, context)) for batch, context in DECODES])
    assert found.coefficients == pytest.approx((TRUE.decode_step_base_s, TRUE.decode_sequence_s, TRUE.decode_context_token_s))


def test_noise_shows_in_the_error_and_leaves_the_fit_near() -> None:
    found = fit(prefills(noise=0.1))
    assert 0 < found.quality.mape < 0.1
    for point in prefills():
        timing = FittedTiming(*found.coefficients, 0, 0, 0)
        assert timing.prefill_s(point.new_tokens, point.context_tokens) == pytest.approx(point.seconds, rel=0.15)


def test_no_coefficient_is_negative() -> None:
    """Steps that get shorter with the batch: the best that is not below zero is a constant."""
    found = fit([DecodePoint(batch, batch * 100, 0.02 - batch * 1e-3) for batch in (1, 2, 4, 8)])
    assert found.coefficients[0] > 0
    assert found.coefficients[1:] == (0, 0)


def test_too_little_to_go_by() -> None:
    with pytest.raises(SetupError, match="at least 3"):
        fit(prefills()[:2])


def test_a_decode_step_is_read_while_all_answers_are_under_way() -> None:
    """The second starts late and the first goes on alone before and after: 10 ms alone, 20 ms together."""
    first, second = AnswerStream(100), AnswerStream(50)
    first.arrivals = [(0.01 * step, 1) for step in range(10)] + [(0.1 + 0.02 * step, 1) for step in range(8)]
    second.arrivals = [(0.08, 1), *((0.1 + 0.02 * step, 1) for step in range(6))]
    point = decode_point([first, second])
    assert point is not None
    assert (point.batch, point.seconds) == (2, pytest.approx(0.02))
    assert 150 < point.context_tokens < 180
    assert decode_point([AnswerStream(10), first]) is None


async def test_a_system_is_measured_and_its_profile_replays(nats_server: NatsServer, unique: str, tmp_path: Path) -> None:
    """What was measured must be no less than what the engine's own timing takes; how much more is the machine's."""
    plan = ProfilePlan(model=unique, lengths=(256, 2048, 4096), batches=(1, 3), contexts=(32, 512), steps=8, repeats=1)
    said = list[str]()
    engine = {"timing": DYNAMO_DEFAULT, "num_blocks": 1024, "block_bytes": 64}
    async with fleet_of(nats_server.url, prefill=1, decode=1, model=unique, **engine):
        profiled = await measure_profile(BrokerSettings(url=nats_server.url), plan, "mine", said.append)
    cached = [point for point in profiled.measured.prefills if point.context_tokens]
    assert [point.new_tokens for point in cached] == [1024, 2048]
    for point in profiled.measured.prefills:
        assert point.seconds >= DYNAMO_DEFAULT.prefill_s(point.new_tokens, 0)
    assert {point.batch for point in profiled.measured.decodes} == {1, 3}
    assert profiled.fitted.kv_capacity_tokens == 1024 * 16
    assert profiled.fitted.kv_bytes_per_token == 64 // 16
    assert any("cached" in line for line in said)
    write_profile(tmp_path / "mine.json", profiled.fitted)
    assert json.loads((tmp_path / "mine.json").read_text())["prefill_quality"]["points"] == 5
    profile = profile_named(str(tmp_path / "mine.json"))
    assert math.isfinite(profile.timing.prefill_s(1000, 0))
    assert profile.timing.prefill_s(4096, 0) > profile.timing.prefill_s(64, 0)


def test_lengths_that_the_model_does_not_take() -> None:
    card = ModelCard(model="m", source="", vocabulary_size=100, max_model_len_tokens=4096, block_size_tokens=16)
    assert ProfilePlan().prompts(card) == [64, 128, 256, 512, 1024, 2048]
    with pytest.raises(SetupError, match="from 1 to 4072"):
        ProfilePlan(lengths=(5000,)).prompts(card)


def test_wrong_options_are_one_line() -> None:
    result = CliRunner().invoke(app, ["profile", "--lengths", "64,x", "--nats-url", "nats://127.0.0.1:9"])
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "--lengths takes whole numbers" in result.stderr
