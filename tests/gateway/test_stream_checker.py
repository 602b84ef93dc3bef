"""The checker of streams finds each kind of broken stream: a checker that accepts everything would prove nothing."""

import json
from typing import Any

import pytest
from stream_checker import check_chat


def chunk(delta: dict[str, Any] | None = None, finish: str | None = None, **fields: Any) -> str:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
    return f"data: {json.dumps({'id': 'a', 'choices': choices, **fields})}\n\n"


ROLE = chunk({"role": "assistant", "content": ""})
TEXT = chunk({"content": "x"})
END = chunk({}, "stop")
USAGE = chunk(usage={"prompt_tokens": 1})
DONE = "data: [DONE]\n\n"
ERROR = 'event: error\ndata: {"error": {"message": "m", "type": "t", "param": null, "code": "c"}}\n\n'


@pytest.mark.parametrize(
    ("stream", "usage"),
    [
        (ROLE + TEXT + END + DONE, False),
        (": keep-alive\n\n" + ROLE + ": keep-alive\n\n" + TEXT + END + USAGE + DONE, True),
        (ROLE + TEXT + ERROR, False),
        (ERROR, False),
    ],
)
def test_a_right_stream_passes(stream: str, usage: bool) -> None:
    check_chat(stream, usage=usage)


@pytest.mark.parametrize(
    "stream",
    [
        "",
        ROLE + TEXT + END,
        ROLE + TEXT + DONE,
        ROLE + TEXT + END + DONE + DONE,
        ROLE + TEXT + END + END + DONE,
        ROLE + TEXT + END + TEXT + DONE,
        TEXT + END + DONE,
        ROLE + ROLE + END + DONE,
        ROLE + END + USAGE + DONE,
        ROLE + TEXT + ERROR + DONE,
        ROLE + END + ERROR,
        "id: r:2.0.00000000\n" + ROLE + "id: r:1.0.00000000\n" + END + DONE,
    ],
)
def test_a_broken_stream_does_not(stream: str) -> None:
    with pytest.raises(AssertionError):
        check_chat(stream)
