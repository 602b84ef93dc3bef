"""The protocol of OpenAI's streams, as an assertion. Every stream of these tests goes through it."""

import json
from dataclasses import dataclass, field
from typing import Any

from jetwake.producers.gateway.positions import split_event_id


@dataclass(frozen=True)
class Event:
    """One server-sent event. `data` is its JSON, or None for the end marker."""

    kind: str
    data: Any
    id: str = ""


@dataclass
class Checked:
    """What a stream said. `error` is set when it ended with one."""

    text: dict[int, str] = field(default_factory=dict)
    finish_reasons: dict[int, str] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    chunks: list[dict[str, Any]] = field(default_factory=list)


def events_in(raw: str) -> list[Event]:
    """Of a whole response body. Comments are dropped, as clients do."""
    found: list[Event] = []
    for block in raw.split("\n\n"):
        fields: dict[str, list[str]] = {}
        for line in block.split("\n"):
            if line and not line.startswith(":"):
                name, _, value = line.partition(": ")
                fields.setdefault(name, []).append(value)
        if "data" in fields:
            data = "\n".join(fields["data"])
            found.append(Event(fields.get("event", [""])[-1], None if data == "[DONE]" else json.loads(data), fields.get("id", [""])[-1]))
    return found


def check_chat(raw: str, choices: int = 1, usage: bool = False) -> Checked:
    return _check(raw, choices, usage, chat=True)


def check_completion(raw: str, choices: int = 1, usage: bool = False) -> Checked:
    return _check(raw, choices, usage, chat=False)


def _check(raw: str, choices: int, usage: bool, chat: bool) -> Checked:
    events = events_in(raw)
    assert events, "an empty stream"
    ids = [split_event_id(event.id)[1].position for event in events if event.id]
    assert ids == sorted(set(ids)), "event ids must rise"
    assert len({event.id.partition(":")[0] for event in events if event.id}) <= 1, "ids are of one request"
    checked = Checked()
    if events[-1].data is not None:
        checked.error = events[-1].data.get("error")
        assert checked.error, "the stream neither ended with [DONE] nor with an error"
        assert set(checked.error) >= {"message", "type", "param", "code"}
    assert sum(event.data is None for event in events) == (0 if checked.error else 1), "[DONE] comes once, and never after an error"
    checked.chunks = [event.data for event in events[:-1]]
    assert all("error" not in chunk for chunk in checked.chunks), "nothing comes after an error"
    roles: set[int] = set()
    for number, chunk in enumerate(checked.chunks):
        assert chunk["id"] == checked.chunks[0]["id"]
        if not chunk["choices"]:
            assert usage, "usage that nobody asked for"
            assert number == len(checked.chunks) - 1, "usage comes last"
            checked.usage = chunk["usage"]
        for choice in chunk["choices"]:
            _take(choice, checked, roles, chat)
    if checked.error:
        assert len(checked.finish_reasons) < choices, "every choice ended well, and then there was an error"
    else:
        assert sorted(checked.finish_reasons) == list(range(choices)), "each choice has one finish_reason"
        assert (checked.usage is not None) == usage
    return checked


def _take(choice: dict[str, Any], checked: Checked, roles: set[int], chat: bool) -> None:
    index = choice["index"]
    assert index not in checked.finish_reasons, "nothing of a choice comes after its finish_reason"
    if chat:
        delta = choice["delta"]
        if "role" in delta:
            assert index not in roles, "a choice has one role chunk"
            assert index not in checked.text, "the role comes first"
            roles.add(index)
        else:
            assert index in roles, "the role comes first"
        text = delta.get("content") or ""
    else:
        text = choice["text"]
    checked.text[index] = checked.text.get(index, "") + text
    if choice["finish_reason"] is not None:
        checked.finish_reasons[index] = choice["finish_reason"]
