"""Server time: read to the nanosecond, close to this machine's when the broker is on it."""

import time

import pytest

from jetwake.pipeline.clock import ServerClock, WallClock, timestamp_ns
from jetwake.pipeline.connection import Bus
from jetwake.schemas.errors import BusRejected


async def test_server_time_is_this_machines_when_the_broker_is_here(bus: Bus) -> None:
    clock = ServerClock(bus)
    clock._offset_ns -= 3_600 * 10**9
    await clock.sync()
    assert abs(clock.now_ns() - time.time_ns()) < 50_000_000


def test_time_does_not_run_backwards() -> None:
    assert WallClock().now_ns() > 1_700_000_000_000_000_000


@pytest.mark.parametrize(
    ("text", "nanoseconds"),
    [
        ("1970-01-01T00:00:01.000000001Z", 1_000_000_001),
        ("1970-01-01T00:00:01Z", 1_000_000_000),
        ("1970-01-01T01:00:00.5+01:00", 500_000_000),
        ("2026-11-29T14:24:07.066179316Z", 1_795_962_247_066_179_316),
    ],
)
def test_a_time_stamp_keeps_its_nanoseconds(text: str, nanoseconds: int) -> None:
    assert timestamp_ns(text) == nanoseconds


def test_a_time_stamp_that_is_none_is_refused() -> None:
    with pytest.raises(BusRejected):
        timestamp_ns("yesterday")
