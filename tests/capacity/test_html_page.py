import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from jetwake.deploy.capacity.html_charts import Axis, cdf, histogram, lines
from jetwake.deploy.capacity.html_page import Section, bars, facts, number, page, table
from jetwake.deploy.capacity.prefix_reuse import PrefixReuse
from jetwake.deploy.capacity.trace_generator import generate_trace, trace_settings
from jetwake.deploy.capacity.trace_stats import trace_stats
from jetwake.deploy.capacity.trace_view import stats_page

HOSTILE = "<script>alert(1)</script>&\"'"
VOID = {"meta"}


class Checked(HTMLParser):
    """Every tag closed in its order; what it refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open = list[str]()
        self.scripts = 0
        self.references = list[str]()
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data", "action", "xlink:href")]
        self.scripts += tag == "script"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Closed in itself."""

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def whole_page() -> str:
    values = {HOSTILE: [float(value) for value in range(1, 900)], "other": [0.0, 5.0]}
    return page(
        HOSTILE,
        HOSTILE,
        [
            Section(HOSTILE, [facts([(HOSTILE, HOSTILE)]), table([HOSTILE], [[HOSTILE]], HOSTILE), bars(HOSTILE, [(HOSTILE, 1, HOSTILE)])]),
            Section(
                "charts",
                [
                    cdf(HOSTILE, values, Axis(HOSTILE, HOSTILE, log=True)),
                    histogram(HOSTILE, values[HOSTILE], Axis(HOSTILE, "ms")),
                    lines("empty", {}, Axis("x"), Axis("y")),
                ],
            ),
        ],
    )


def trace_page() -> str:
    trace = generate_trace(trace_settings("agents"))
    reuse = PrefixReuse(trace, 64)
    return stats_page(trace_stats(trace, reuse), trace, reuse)


@pytest.mark.parametrize("made", [whole_page, trace_page])
def test_a_page_is_whole_and_fetches_nothing(made: object) -> None:
    assert callable(made)
    text = made()
    checked = Checked(text)

    assert checked.open == []
    assert checked.references == []
    assert not re.search(r"https?://|//[a-z]|@import|url\(|\bfetch\b|XMLHttp|\bimport\b", text)
    assert checked.scripts == 1
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(svg)


def test_what_is_given_is_escaped() -> None:
    assert HOSTILE not in whole_page()


def test_lines_tell_their_points_to_the_pointer() -> None:
    svg = ElementTree.fromstring(re.findall(r"<svg.*?</svg>", lines("t", {"a": [(0, 0), (10, 50)]}, Axis("x", "s"), Axis("y", "%")))[0])
    [[name, colour, points]] = json.loads(svg.attrib["data-points"])

    assert (name, colour, [point[2:] for point in points]) == ("a", 0, [["0 s", "0%"], ["10 s", "50%"]])
    assert points[0][0] < points[1][0]
    assert points[0][1] > points[1][1]


def test_long_series_are_thinned_and_keep_their_peaks() -> None:
    points = [(float(x), 1000.0 if x == 7777 else float(x % 7)) for x in range(20_000)]
    drawn = lines("t", {"a": points}, Axis("x"), Axis("y"))

    assert len(drawn) < 40_000
    assert "1,000" in drawn
    assert "7,777" in drawn


def test_a_histogram_counts_every_value() -> None:
    drawn = histogram("t", [0, 1, 1, 2, 1000], Axis("x", log=True))

    assert sum(int(count.replace(",", "")) for count in re.findall(r": ([\d,]+)</title>", drawn)) == 5


@pytest.mark.parametrize(("value", "text"), [(0, "0"), (0.1234, "0.123"), (12, "12"), (1234, "1,234"), (12_345, "12.3k"), (2.5e6, "2.5M")])
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text
