"""`docs/openai.md` says of each field whether it is honoured, refused or ignored: all of it is tried here."""

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fleet import fleet_of
from gateway_system import RunningGateway, gateway_of
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as OpenAiChat
from openai.types.completion_create_params import CompletionCreateParamsBase as OpenAiCompletion

from jetwake.deploy.demo_model import fetch
from jetwake.deploy.nats_server import NatsServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(120)]

DOCUMENT = (Path(__file__).parents[2] / "docs" / "openai.md").read_text()
ROW = re.compile(r"^\| `([a-z_]+)` \| (honoured|refused|ignored) \|", re.MULTILINE)
MODEL = "sim"
TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
BASIC: dict[str, dict[str, Any]] = {
    "chat": {"model": MODEL, "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 6, "temperature": 0},
    "completions": {"model": MODEL, "prompt": "hello there", "max_tokens": 6, "temperature": 0},
}
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}

EXTRA: dict[str, dict[str, Any]] = {
    # What another field needs beside it.
    "top_logprobs": {"logprobs": True},
    "logprob_token_ids": {"logprobs": True},
    "n": {"temperature": 1},
    "stream_options": {"stream": True},
    "tool_choice": {"tools": [TOOL]},
    "continue_final_message": {
        "add_generation_prompt": False,
        "messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "the"}],
    },
}
VALUES: dict[str, Any] = {
    # A value that asks for something.
    "messages": [{"role": "user", "content": "another"}],
    "prompt": "another",
    "model": MODEL,
    "frequency_penalty": 0.5,
    "logit_bias": {"700": 100},
    "logprobs": True,
    "top_logprobs": 2,
    "max_tokens": 3,
    "max_completion_tokens": 3,
    "n": 2,
    "presence_penalty": 0.5,
    "response_format": {"type": "json_object"},
    "seed": 7,
    "stop": ["zzz"],
    "stream": True,
    "stream_options": {"include_usage": True},
    "temperature": 0.5,
    "top_p": 0.5,
    "tools": [TOOL],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "parallel_tool_calls": False,
    "reasoning_effort": "low",
    "include_reasoning": False,
    "top_k": 3,
    "min_p": 0.1,
    "repetition_penalty": 1.2,
    "stop_token_ids": [5],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "min_tokens": 2,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "truncate_prompt_tokens": 2,
    "truncation_side": "left",
    "allowed_token_ids": [600, 601],
    "bad_words": ["zzz"],
    "echo": True,
    "add_generation_prompt": False,
    "continue_final_message": True,
    "add_special_tokens": True,
    "documents": [{"title": "t", "text": "x"}],
    "chat_template": "{{ messages[0]['content'] }}",
    "chat_template_kwargs": {"x": 1},
    "structured_outputs": {"regex": "a+"},
    "priority": 1,
    "session_id": "s",
    "return_tokens_as_token_ids": True,
    "return_token_ids": True,
    "return_prompt_text": True,
    "stream_interval": 2,
    "suffix": "the end",
    "vllm_xargs": {"jw_forced": "1"},
    "prompt_logprobs": 1,
    "logprob_token_ids": [5],
    "thinking_token_budget": 5,
    "repetition_detection": {"max_pattern_size": 3, "min_pattern_size": 1, "min_count": 3},
    "routed_experts_prompt_start": 1,
    "use_beam_search": True,
    "cache_salt": "salt",
    "kv_transfer_params": {"do_remote_prefill": True},
    "ec_transfer_params": {"x": 1},
    "functions": [{"name": "f"}],
    "function_call": "auto",
    "audio": {"voice": "x", "format": "wav"},
    "modalities": ["text", "audio"],
    "web_search_options": {"search_context_size": "low"},
    "moderation": {"model": "x"},
    "best_of": 2,
    "prompt_embeds": "AAAA",
    "user": "u",
    "safety_identifier": "u",
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "flex",
    "prediction": {"type": "content", "content": "x"},
    "verbosity": "low",
    "prompt_cache_key": "k",
    "prompt_cache_options": {},
    "prompt_cache_retention": "24h",
    "length_penalty": 2.0,
    "watermarking": True,
    "request_id": "mine",
    "media_io_kwargs": {"image": {}},
    "mm_processor_kwargs": {"x": 1},
    "mm_payload": "none",
    "return_mm_kwargs": False,
    "return_token_offsets": True,
}
NEEDS_WORDS = frozenset({"stop", "bad_words", "response_format", "structured_outputs", "tool_choice"})
"""Simulated engines have no words: that they refuse these shows that they were told. Real engines honour them in test_conformance."""
REFUSED_HERE = {"suffix": "suffix", "chat_template": "trust"}
"""Honoured by other models or with a flag; the refusal says so."""


def table(heading: str) -> dict[str, str]:
    section = DOCUMENT.partition(f"## {heading}, field by field")[2].partition("\n## ")[0]
    rows = ROW.findall(section)
    assert len(rows) == len(dict(rows)), "a field is in the table twice"
    return dict(rows)


TABLES = {"chat": table("Chat completions"), "completions": table("Completions")}
ROWS = [(api, field, word) for api, rows in TABLES.items() for field, word in rows.items()]


@pytest.fixture(scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningGateway]:
    tokenizer = str(await asyncio.to_thread(fetch, "tiny"))
    async with (
        NatsServer(tmp_path_factory.mktemp("nats"), sync_always=False) as server,
        fleet_of(server.url, aggregated=1, tokenizer=tokenizer, vocabulary_size=2048),
        gateway_of(server.url, flags=("--enable-auto-tool-choice", "--tool-call-parser", "hermes")) as made,
    ):
        yield made


async def post(gateway: RunningGateway, api: str, fields: dict[str, Any]) -> httpx.Response:
    return await gateway.http.post(PATHS[api], json={**BASIC[api], **fields})


def test_the_tables_have_every_field_there_is() -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    assert set(TABLES["chat"]) == set(ChatCompletionRequest.model_fields) | set(OpenAiChat.__annotations__)
    assert set(TABLES["completions"]) == set(CompletionRequest.model_fields) | set(OpenAiCompletion.__annotations__)


@pytest.mark.parametrize(("api", "field", "word"), ROWS, ids=[f"{api}-{field}" for api, field, _ in ROWS])
async def test_a_field_does_what_its_row_says(gateway: RunningGateway, api: str, field: str, word: str) -> None:
    value = 2 if (api, field) == ("completions", "logprobs") else VALUES[field]
    fields = {**EXTRA.get(field, {}), field: value}
    response = await post(gateway, api, fields)
    if word == "refused" or field in REFUSED_HERE:
        assert response.status_code == 400, response.text
        named = "prompt_logprobs" if (api, field) == ("chat", "echo") else REFUSED_HERE.get(field, field)
        assert named in response.json()["error"]["message"]
    elif word == "ignored":
        assert response.status_code == 200, response.text
        assert response.json()["choices"] == (await post(gateway, api, {})).json()["choices"]
    elif field in NEEDS_WORDS:
        assert response.json()["error"]["code"] == "engine_refused"
    else:
        assert response.status_code == 200, response.text
