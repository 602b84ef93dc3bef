"""What is checked of a batch's lines before any is sent, and in what order they are sent."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from jetwake.consumers.block_pool import BlockPool
from jetwake.producers.batches.lines import MAX_ERRORS, BatchLimits, Checked, LineChecker, LineFile, split_lines
from jetwake.producers.batches.order import STEP_CHARACTERS, prompt_text, send_order, trail_of
from jetwake.producers.batches.output import result_line, unrun_line
from jetwake.schemas.batches import LineError, LineResult
from jetwake.schemas.blocks import block_hashes, root_hash
from jetwake.schemas.tokens import pack_tokens


def a_line(custom_id: Any, text: str = "hello", **changes: Any) -> dict[str, Any]:
    body = {"model": "sim", "messages": [{"role": "user", "content": text}]}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body} | changes


def checked(path: Path, lines: list[Any], endpoint: str = "/v1/chat/completions", **limits: Any) -> Checked:
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))

    def no_nonsense(endpoint: str, body: dict[str, Any]) -> LineError | None:
        return LineError(code="invalid_request", message="nonsense", param="nonsense") if "nonsense" in body else None

    checker = LineChecker(endpoint, BatchLimits(**limits), {"sim", "alias"}.__contains__, no_nonsense)
    for offset, raw in split_lines(path):
        checker.take(offset, raw)
    return checker.finish()


def test_good_lines_are_found_again_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    found = checked(path, [a_line("ä"), b"", a_line("b", "ünïcode " * 50), a_line("c")])
    assert not found.errors
    assert [(line.number, line.custom_id) for line in found.lines] == [(1, "ä"), (3, "b"), (4, "c")]
    source = LineFile(path)
    assert json.loads(source.body(found.lines[1]))["messages"][0]["content"] == "ünïcode " * 50
    source.close()


@pytest.mark.parametrize(
    ("bad", "code", "param"),
    [
        (b"{not json", "invalid_json_line", None),
        (b"\xff\xfe", "invalid_json_line", None),
        (b"[" * 100_000, "invalid_json_line", None),
        (b"[1]", "invalid_json_line", None),
        (a_line(None), "missing_required_parameter", "custom_id"),
        (a_line(""), "missing_required_parameter", "custom_id"),
        (a_line(5), "missing_required_parameter", "custom_id"),
        (a_line("x" * 513), "invalid_custom_id", "custom_id"),
        (a_line("one"), "duplicate_custom_id", "custom_id"),
        (a_line("b", url="/v1/embeddings"), "invalid_url", "url"),
        (a_line("b", url="/v1/completions"), "mismatched_endpoint", "url"),
        (a_line("b", method="GET"), "invalid_method", "method"),
        (a_line("b", body="x"), "missing_required_parameter", "body"),
        (a_line("b", body={"messages": []}), "missing_required_parameter", "body.model"),
        (a_line("b", body={"model": "nope"}), "model_not_found", "body.model"),
        (a_line("b", body={"model": "alias"}), "mismatched_model", "body.model"),
        (a_line("b", body={"model": "sim", "stream": True}), "invalid_request", "body.stream"),
        (a_line("b", body={"model": "sim", "nonsense": 1}), "invalid_request", "body.nonsense"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, bad: Any, code: str, param: str | None) -> None:
    found = checked(tmp_path / "in.jsonl", [a_line("one"), b"", bad, a_line("three")])
    assert [(error.code, error.line, error.param) for error in found.all_errors()] == [(code, 3, param)]
    assert [line.number for line in found.lines] == [1, 4]


@pytest.mark.parametrize("lines", [[], [b""], [b" ", b"\r"]])
def test_an_empty_file_is_refused(tmp_path: Path, lines: list[Any]) -> None:
    assert [error.code for error in checked(tmp_path / "in.jsonl", lines).all_errors()] == ["empty_file"]


def test_too_many_lines_and_too_many_errors(tmp_path: Path) -> None:
    found = checked(tmp_path / "in.jsonl", [a_line(str(number)) for number in range(12)], max_lines=10)
    assert [(error.code, error.line) for error in found.all_errors()] == [("too_many_lines", 11)]
    assert "12 lines" in found.errors[0].message
    assert "at most 10" in found.errors[0].message
    found = checked(tmp_path / "in.jsonl", [b"?"] * (MAX_ERRORS + 5))
    assert len(found.all_errors()) == MAX_ERRORS + 1
    assert found.all_errors()[-1].message.startswith("5 more")


def test_order_puts_equal_beginnings_together_and_keeps_the_rest() -> None:
    first, second, deeper = "a" * STEP_CHARACTERS, "b" * STEP_CHARACTERS, "c" * STEP_CHARACTERS
    texts = [first + "1", second + "2", first + deeper + "3", "short", second + "5", first + "6", first + deeper + "7"]
    assert send_order([trail_of(text) for text in texts]) == [3, 0, 5, 2, 6, 1, 4]
    assert send_order([]) == []


def test_the_text_of_a_prompt_begins_with_what_is_rendered_first() -> None:
    tools = {"tools": [{"type": "function"}], "messages": [{"role": "user", "content": "x"}]}
    assert prompt_text(tools).startswith('[{"type"')
    assert prompt_text({"prompt": [1, 2, 3]}) == "[1, 2, 3]"
    assert prompt_text({"instructions": "be brief", "input": "hello"}) == "be brief\nhello"


def hit_share(prompts: list[str], blocks: int) -> float:
    """Of a cache of so many blocks that serves these one after the other, a character being a token."""
    pool, hits, total = BlockPool(blocks, 16), 0, 0
    for text in prompts:
        hashes = block_hashes(pack_tokens(list(text.encode())), 16, root_hash("sim"))
        allocation = pool.allocate(len(text), hashes)
        assert allocation is not None
        pool.commit(allocation.blocks[: len(hashes)], hashes)
        pool.release(allocation.blocks)
        hits += allocation.hits
        total += len(hashes)
    return hits / total


def test_the_order_makes_a_small_cache_hit() -> None:
    """40 documents of about 2,000 tokens, five questions about each, in a random order; the cache holds four documents."""
    draw = random.Random(7)
    documents = ["".join(draw.choices("abcdefgh ", k=2048)) for _ in range(40)]
    prompts = [
        document + f" question {number:03d} " + "".join(draw.choices("xyz ", k=200)) for document in documents for number in range(5)
    ]
    draw.shuffle(prompts)
    ordered = [prompts[place] for place in send_order([trail_of(text) for text in prompts])]
    assert sorted(ordered) == sorted(prompts)
    assert hit_share(prompts, 600) < 0.2
    assert hit_share(ordered, 600) > 0.65


def test_output_lines_are_those_of_openai() -> None:
    body = b'{\n"id": "x"\n}'
    result = LineResult(batch_id="batch_1", line=3, custom_id='quo"te', request_id="batch_1-3", status=200, body=body)
    line = result_line(result)
    assert line.count(b"\n") == 1
    fields = json.loads(line)
    assert fields == {
        "id": "batch_req_1-3",
        "custom_id": 'quo"te',
        "response": {"status_code": 200, "request_id": "batch_1-3", "body": {"id": "x"}},
        "error": None,
    }
    unrun = json.loads(unrun_line("batch_1", 4, "four", "batch_expired"))
    assert unrun["response"] is None
    assert unrun["error"]["code"] == "batch_expired"
