import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetwake.deploy.capacity.text_traces import TextOptions
from jetwake.deploy.capacity.trace import Trace, TraceRequest, prompt_hashes
from jetwake.deploy.capacity.trace_formats import read_trace, write_trace
from jetwake.schemas.errors import SetupError

PUBLISHED = (
    '{"timestamp": 27482, "input_length": 1535, "output_length": 52, "hash_ids": [46, 47, 2353]}\n'
    '{"timestamp": 30535, "input_length": 1025, "output_length": 26, "hash_ids": [46, 47, 2366]}\n'
)
CONVERSATION = {
    "id": "one",
    "conversations": [
        {"from": "system", "value": "s" * 300},
        {"from": "human", "value": "a" * 700},
        {"from": "gpt", "value": "b" * 400},
        {"from": "human", "value": "c" * 40},
        {"from": "gpt", "value": "d" * 8},
    ],
}


def file_of(folder: Path, text: str, name: str = "trace.jsonl") -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_the_published_form_is_read(tmp_path: Path, name: str) -> None:
    trace = read_trace(file_of(tmp_path, PUBLISHED, name))

    assert trace == Trace(name, 512, (TraceRequest(27.482, 1535, 52, (46, 47, 2353)), TraceRequest(30.535, 1025, 26, (46, 47, 2366))))
    first, second = prompt_hashes(trace, 64)
    assert (len(first), len(second)) == (23, 16)
    assert first[:16] == second


def test_requests_come_in_the_order_of_their_times(tmp_path: Path) -> None:
    lines = PUBLISHED.splitlines()

    assert read_trace(file_of(tmp_path, f"\n{lines[1]}\n\n{lines[0]}")).requests == read_trace(file_of(tmp_path, PUBLISHED, "b")).requests


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    stretch_tokens = draw(st.sampled_from([1, 16, 64, 512]))
    requests = list[TraceRequest]()
    for at_us in sorted(draw(st.lists(st.integers(0, 10**11), max_size=8))):
        content = draw(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=5))
        input_tokens = (len(content) - 1) * stretch_tokens + draw(st.integers(1, stretch_tokens))
        output_tokens, session = draw(st.integers(0, 10**6)), draw(st.text(max_size=5))
        requests.append(TraceRequest(at_us / 1e6, input_tokens, output_tokens, tuple(content), session))
    return Trace("t", stretch_tokens, tuple(requests))


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
@given(trace=traces().filter(lambda trace: trace.requests))
@settings(max_examples=50, deadline=None)
def test_what_is_written_is_read_back_equal(tmp_path_factory: pytest.TempPathFactory, suffix: str, trace: Trace) -> None:
    path = tmp_path_factory.mktemp("traces") / f"trace.{suffix}"
    write_trace(trace, path)

    assert (path.read_bytes()[:2] == b"\x1f\x8b") == (suffix == "jsonl.gz")
    read = read_trace(path)
    assert (read.stretch_tokens, read.requests) == (trace.stretch_tokens, trace.requests)


def test_whole_milliseconds_stay_whole_numbers_as_published(tmp_path: Path) -> None:
    write_trace(read_trace(file_of(tmp_path, PUBLISHED)), tmp_path / "again.jsonl")

    assert (tmp_path / "again.jsonl").read_text() == PUBLISHED


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": [1]', "not valid JSON"),
        ("[1, 2]", "a list where a JSON object should be"),
        (
            '{"timestamp": 1, "input_length": 0, "output_length": 1, "hash_ids": []}',
            "input_length must be a whole number, at least 1, not 0",
        ),
        ('{"timestamp": 1, "output_length": 1, "hash_ids": [1]}', "input_length must be a whole number, at least 1, not None"),
        ('{"timestamp": 1, "input_length": 5, "output_length": -1, "hash_ids": [1]}', "output_length must be"),
        ('{"timestamp": -1, "input_length": 5, "output_length": 1, "hash_ids": [1]}', "timestamp must be milliseconds from 0 on, not -1"),
        ('{"timestamp": NaN, "input_length": 5, "output_length": 1, "hash_ids": [1]}', "timestamp must be"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": ["a"]}', "hash_ids must be a list of whole numbers"),
        (
            '{"timestamp": 1, "input_length": 513, "output_length": 1, "hash_ids": [1]}',
            "513 input tokens have 2 hash ids of 512 tokens, not 1",
        ),
        ('{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": [1], "hash_tokens": 64}', "hash_tokens is 64, and 512"),
    ],
)
def test_a_broken_line_is_told_with_its_number(tmp_path: Path, line: str, told: str) -> None:
    path = file_of(tmp_path, f"{PUBLISHED}\n{line}\n")

    with pytest.raises(SetupError) as caught:
        read_trace(path)
    assert f"{path}, line 4: " in str(caught.value)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "has no requests; expected Mooncake lines"),
        ('{"prompt": "hello"}', "line 1: no trace has only the keys prompt; expected Mooncake lines"),
        ('[{"conversations": []},\n {]', "line 2: not valid JSON"),
        ('[{"conversations": []}]', "no turn is from human or user"),
        ('[{"conversations": [{"from": "human"}]}]', 'item 1: a message of conversations has no "value"'),
        ('{"conversations": "x"}', "line 1: conversations must be a list"),
        ('{"custom_id": "1"}', "line 1: body must be an object"),
        ('{"custom_id": "1", "body": {"prompt": ["a"]}}', "line 1: body must have messages, or a prompt"),
        ('{"custom_id": "1", "body": {"prompt": "a", "max_tokens": 0}}', "line 1: max_tokens must be a whole number, at least 1, not 0"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(SetupError) as caught:
        read_trace(file_of(tmp_path, text))
    assert told in str(caught.value)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    cut = tmp_path / "cut.gz"
    cut.write_bytes(gzip.compress(PUBLISHED.encode())[:-20])
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (cut, binary, tmp_path / "missing", tmp_path):
        with pytest.raises(SetupError, match=str(path)):
            read_trace(path)
    with pytest.raises(SetupError, match="cannot write"):
        write_trace(read_trace(file_of(tmp_path, PUBLISHED)), tmp_path / "no folder" / "trace.jsonl")


def test_each_turn_of_a_conversation_is_a_request_on_the_turns_before(tmp_path: Path) -> None:
    as_list, as_lines = json.dumps([CONVERSATION], indent=1), json.dumps(CONVERSATION)
    trace = read_trace(file_of(tmp_path, as_list))
    first, second = trace.requests

    assert read_trace(file_of(tmp_path, as_lines, "lines")).requests == trace.requests
    before_first = len(f"system\n{'s' * 300}\nhuman\n{'a' * 700}\n")
    assert first.input_tokens == -(-before_first // 4)
    assert (first.output_tokens, second.output_tokens) == (100, 2)
    assert (first.session, second.session, first.at_s, second.at_s) == ("one", "one", 0, 0)
    shared = before_first // (4 * 64)
    assert second.content[:shared] == first.content[:shared]
    assert set(second.content[shared:]).isdisjoint(first.content)
    assert any("4 characters for a token" in note for note in trace.notes)


def test_conversations_come_at_the_rate_asked_for_and_their_turns_in_order(tmp_path: Path) -> None:
    text = "".join(json.dumps({**CONVERSATION, "id": number}) + "\n" for number in range(2000))
    trace = read_trace(file_of(tmp_path, text), TextOptions(rate_per_s=10))
    times_s = [request.at_s for request in trace.requests]

    assert times_s == sorted(times_s)
    first_turns = [request.at_s for request in trace.requests if request.input_tokens == trace.requests[0].input_tokens]
    assert (len(first_turns), first_turns[-1]) == (2000, pytest.approx(4000 / 10, rel=0.1))
    sessions: dict[str, list[TraceRequest]] = {}
    for request in trace.requests:
        sessions.setdefault(request.session, []).append(request)
    assert len(sessions) == 2000
    for first, second in sessions.values():
        assert first.input_tokens < second.input_tokens
        assert first.at_s < second.at_s


def test_batch_lines_share_their_system_prompt_and_are_as_long_as_the_tokenizer_says(tmp_path: Path) -> None:
    def line(number: int, question: str, **more: int) -> str:
        messages = [{"role": "system", "content": "w " * 200}, {"role": "user", "content": [{"type": "text", "text": question}]}]
        return json.dumps(
            {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": {"messages": messages, **more}}
        )

    text = "\n".join([line(1, "a " * 50, max_tokens=9), line(2, "b"), '{"custom_id": "3", "body": {"prompt": [7, 8, 9]}}'])
    options = TextOptions(encode=lambda words: [len(word) for word in words.split()], output_tokens=77, stretch_tokens=100)
    one, two, tokens = read_trace(file_of(tmp_path, text), options).requests

    assert (one.input_tokens, two.input_tokens, tokens.input_tokens) == (252, 203, 3)
    assert (one.output_tokens, two.output_tokens) == (9, 77)
    assert one.content[:2] == two.content[:2]
    assert one.content[2] != two.content[2]
    assert one.at_s == two.at_s == 0
