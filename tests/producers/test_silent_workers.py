"""A worker whose cache changes and who tells nothing is named, once."""

import logging

import pytest

from jetwake.producers.silent_workers import SilenceAlarm, silent_workers
from jetwake.schemas.workers import WorkerLoad


def load(worker: str, kv_silent_s: float) -> WorkerLoad:
    return WorkerLoad(worker=worker, incarnation="1", kv_silent_s=kv_silent_s)


def test_who_has_been_silent_for_ten_seconds_is_named() -> None:
    assert silent_workers([load("a", 0.0), load("b", 9.9), load("c", 12.34)]) == {"c": 12.3}


def test_the_warning_comes_once_for_each_incarnation(caplog: pytest.LogCaptureFixture) -> None:
    alarm = SilenceAlarm()
    with caplog.at_level(logging.WARNING):
        for silent_s in (5.0, 12.0, 13.0):
            alarm.look("prefill-2-x", load("prefill-2", silent_s))
        assert [record.getMessage()[:35] for record in caplog.records] == ["no KV events from prefill-2 for 12 "]
        alarm.look("prefill-2-y", load("prefill-2", 10.0))
    assert len(caplog.records) == 2


def test_engines_that_tell_no_events_by_design_are_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    SilenceAlarm(expects_events=False).look("a-1", load("a", 60.0))
    assert not caplog.records
