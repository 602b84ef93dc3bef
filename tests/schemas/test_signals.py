"""Names of signals: one of each, bounded labels, and a page that says what the code says."""

from pathlib import Path

from jetwake.schemas.signals import ATTRIBUTES, METRICS, OTHER, SPANS, Metric
from jetwake.schemas.signals_page import with_tables

PAGE = Path(__file__).parents[2] / "docs" / "signals.md"


def test_the_page_says_what_the_code_says() -> None:
    page = PAGE.read_text()
    assert page == with_tables(page), "run: python -m jetwake.schemas.signals_page docs/signals.md"


def test_no_name_stands_for_two_things() -> None:
    for named in (METRICS, SPANS, ATTRIBUTES):
        assert len({each.name for each in named}) == len(named)
    assert len({metric.prometheus for metric in METRICS}) == len(METRICS)


def test_histograms_and_only_they_have_buckets_in_order() -> None:
    def is_right(metric: Metric) -> bool:
        return sorted(set(metric.buckets)) == list(metric.buckets) and bool(metric.buckets) == (metric.kind == "histogram")

    assert [metric.name for metric in METRICS if not is_right(metric)] == []


def test_a_value_that_a_label_does_not_have_is_other() -> None:
    [outcome] = {label for metric in METRICS for label in metric.labels if label.name == "outcome"}
    assert outcome.bound("finished") == "finished"
    assert outcome.bound("made up") == OTHER
