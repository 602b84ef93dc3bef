"""The page in a terminal: the same numbers, and markup from outside is text."""

import json

import pytest
from pictures import card, ended, history, known, load, way
from rich.console import Console

from jetwake.deploy.dashboard.request_text import print_story
from jetwake.deploy.dashboard.story import of_event
from jetwake.deploy.dashboard.top import frame, sparks
from jetwake.deploy.dashboard.view import snapshot
from jetwake.schemas.routing import ConsideredLane, Explanation

HOSTILE = "[bold red]x[/nonsense]"


def test_top_shows_pools_findings_and_requests() -> None:
    full = load("decode-1", running_requests=4, used_blocks=95)
    event = ended(1, stages=way(handoff=1500), outcome="failed", code=HOSTILE)
    now = snapshot(known(card("prefill-1", "prefill"), card("decode-1", "decode"), loads=(full,)), history(event))
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(frame(now))
    text = console.export_text()
    assert HOSTILE in text
    assert "████████░░" not in text
    assert "██████████ 4/4" in text
    assert "1 request of 1 failed" in text


def test_a_request_is_told_with_its_waterfall_and_the_routers_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    lanes = [ConsideredLane(lane="prefill-1-i1", role="prefill", score=0.1, words=HOSTILE)]
    why = Explanation(router="router-1", policy="kv_aware", lane="prefill-1-i1", reason=HOSTILE, considered=lanes)
    event = ended(1, stages=way(rest=100_000), prefill_worker="prefill-1", decode_worker="decode-1", kv_bytes=2_000_000, cached_tokens=500)
    story = of_event(event, why)
    print_story(story, as_json=False)
    text = capsys.readouterr().out
    for expected in (
        HOSTILE,
        "r1",
        "500 (50 %) from cache",
        "prefill queue",
        "transfer",
        "50 ms",
        "›",
        "prefill on prefill-1, decode on decode-1, 2.0 MB",
    ):
        assert expected in text, expected
    print_story(story, as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert [bar["stage"] for bar in told["bars"]][-1] == "generation"
    assert told["routing"]["reason"] == HOSTILE


def test_sparks_are_as_high_as_their_values() -> None:
    assert sparks([0, 7, None, 14]) == "▁▅ █"
