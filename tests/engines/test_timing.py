"""Step times are pure figures; the clock lets steps pass one by one and shares a decode step between sequences."""

import asyncio
import time

import pytest

from jetwake.consumers.step_clock import MOST_STEPS_AT_ONCE, StepClock
from jetwake.consumers.timing import DYNAMO_DEFAULT, ZERO, Timing, timing_named
from jetwake.schemas.errors import SetupError


@pytest.mark.parametrize(("tokens", "milliseconds"), [(0, 16.50142), (1000, 32.1058489), (8192, 169.13692)])
def test_prefill_of_dynamo_default(tokens: int, milliseconds: float) -> None:
    """Computed by hand from 4.209989e-07 n^2 + 1.518344e-02 n + 16.50142."""
    assert DYNAMO_DEFAULT.prefill_s(tokens, 0) == pytest.approx(milliseconds / 1000, rel=1e-6)


@pytest.mark.parametrize(("used", "milliseconds"), [(0.0, 5.74), (0.5, 26.31), (1.0, 34.01), (3.0, 34.01)])
def test_decode_of_dynamo_default(used: float, milliseconds: float) -> None:
    """Computed by hand from -25.74 u^2 + 54.01 u + 5.74, u at most 1."""
    assert DYNAMO_DEFAULT.decode_step_s(7, used) == pytest.approx(milliseconds / 1000)


def test_named() -> None:
    assert timing_named("zero") is ZERO
    assert timing_named("dynamo-default", speed=10).prefill_s(0, 0) == pytest.approx(0.001650142)
    with pytest.raises(SetupError, match="dynamo-default"):
        timing_named("warp")
    with pytest.raises(SetupError, match="above 0"):
        timing_named("zero", speed=0)


class CountedTiming(Timing):
    """Remembers the batch of each step; a decode step takes a little."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def prefill_s(self, new_tokens: int, context_tokens: int) -> float:
        return new_tokens / 1e6

    def decode_step_s(self, batch: int, used_fraction: float, context_tokens: float) -> float:
        self.batches.append(batch)
        return 1e-4


async def test_decoding_sequences_share_steps() -> None:
    timing = CountedTiming()
    clock = StepClock(timing, lambda: 0.5)
    runner = asyncio.create_task(clock.run())

    async def sequence() -> None:
        for _ in range(5):
            assert await clock.decode(1) >= 1

    await asyncio.gather(*(sequence() for _ in range(8)))
    runner.cancel()
    assert sum(batch > 1 for batch in timing.batches) == 5
    assert max(timing.batches) == 8


async def test_a_clock_that_is_behind_takes_several_steps_at_once() -> None:
    clock = StepClock(CountedTiming(), lambda: 0.5)
    runner = asyncio.create_task(clock.run())
    assert await clock.decode(1) == 1
    time.sleep(0.05)  # noqa: ASYNC251  the loop stands still, and with it the clock
    assert await clock.decode(1) == MOST_STEPS_AT_ONCE
    runner.cancel()


async def test_prefill_and_decode_take_turns() -> None:
    """Neither starves while the other has more to do; a cancelled waiter stops nobody."""
    clock = StepClock(CountedTiming(), lambda: 0.5)
    runner = asyncio.create_task(clock.run())
    order: list[str] = []

    async def note(name: str, work: asyncio.Future[object]) -> None:
        await work
        order.append(name)

    gone = asyncio.ensure_future(clock.prefill(10, 0))
    waiting = [note("p", asyncio.ensure_future(clock.prefill(10, 0))) for _ in range(4)]
    waiting.append(note("d", asyncio.ensure_future(clock.decode(1))))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.gather(*waiting)
    runner.cancel()
    assert order.index("d") < 3


async def test_no_time_needs_no_loop() -> None:
    clock = StepClock(ZERO, lambda: 0.0)
    await clock.prefill(1000, 0)
    assert not await clock.decode(1)
    assert clock.last_step_at > 0
