"""The official `openai` and `anthropic` clients against `jetwake up` with real vLLM engines: what applications do, unchanged."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import psutil
import pytest
from stream_checker import Checked, check_chat, check_completion, events_in

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

MODEL = "tiny"
CHAT_TEMPLATE = (
    "{{ '<s>' }}{% for tool in tools or [] %}{{ '<|user|>' + tool['function']['name'] }}{% endfor %}"
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}{{ call['function']['name'] + (call['function']['arguments'] | tojson) }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
SCHEMA: Any = {
    "type": "object",
    "properties": {"colour": {"type": "string", "enum": ["red", "green"]}, "count": {"type": "integer", "enum": [1, 2, 3]}},
    "required": ["colour", "count"],
    "additionalProperties": False,
}
HELLO: Any = [{"role": "user", "content": "Tell me about the river and the stone."}]


@dataclass
class Api:
    openai: openai.AsyncOpenAI
    anthropic: anthropic.AsyncAnthropic
    http: httpx.AsyncClient
    environment: dict[str, str]
    up: asyncio.subprocess.Process

    def worker(self, name: str) -> psutil.Process:
        """The process of the worker of this name, as it runs now."""
        [found] = [child for child in psutil.Process(self.up.pid).children() if name in child.cmdline()]
        return found

    async def checked_chat(self, choices: int = 1, usage: bool = False, **fields: Any) -> Checked:
        return check_chat(await self._stream("chat/completions", fields), choices, usage)

    async def checked_completion(self, choices: int = 1, usage: bool = False, **fields: Any) -> Checked:
        return check_completion(await self._stream("completions", fields), choices, usage)

    async def _stream(self, path: str, fields: dict[str, Any]) -> str:
        response = await self.http.post(path, json={"model": MODEL, "stream": True, **fields})
        assert response.status_code == 200, response.text
        return response.text


@pytest.fixture(scope="module")
async def api(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Api]:
    folder = tmp_path_factory.mktemp("up")
    template = folder / "template.jinja"
    template.write_text(CHAT_TEMPLATE)
    environment = {**os.environ, "JETWAKE_STATE_DIR": str(folder)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "jetwake.deploy.cli", "up", "--model", MODEL, "--port", "0", "--store", str(folder / "store"),
        "--engine-option", "max_model_len=2048", "--engine-option", "num_gpu_blocks_override=512",
        "--engine-option", 'structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": true}',
        "--", "--chat-template", str(template), "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
        env=environment, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        async with asyncio.timeout(600):
            line = (await process.stdout.readline()).decode()
        word, url = line.split() if line.strip() else ("nothing", logs(folder))
        assert word == "ready", url
        async with httpx.AsyncClient(base_url=url, timeout=300) as http:
            yield Api(
                openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=300),
                anthropic.AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key="none", max_retries=0, timeout=300),
                http,
                environment,
                process,
            )
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def logs(folder: Path) -> str:
    return "\n".join(path.read_text(errors="replace")[-2000:] for path in (folder / "store" / "logs").glob("*.log"))


# --------------------------------------------------------------------------------------------------------------------- chat


async def test_chat_plain_and_streamed_say_the_same(api: Api) -> None:
    options: Any = {"messages": HELLO, "max_tokens": 20, "temperature": 0}
    plain = await api.openai.chat.completions.create(model=MODEL, **options)
    assert plain.choices[0].message.content
    assert plain.usage is not None
    stream = await api.openai.chat.completions.create(model=MODEL, stream=True, **options)
    pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
    checked = await api.checked_chat(usage=True, stream_options={"include_usage": True}, **options)
    assert "".join(pieces) == checked.text[0] == plain.choices[0].message.content
    assert checked.usage is not None
    assert checked.usage["completion_tokens"] == plain.usage.completion_tokens


async def test_the_second_turn_finds_the_first_in_the_cache(api: Api) -> None:
    messages: Any = [{"role": "user", "content": "the mill by the bridge, " * 20}]
    first = await api.openai.chat.completions.create(model=MODEL, messages=messages, max_tokens=8, temperature=0)
    messages += [{"role": "assistant", "content": first.choices[0].message.content}, {"role": "user", "content": "and then?"}]
    second = await api.openai.chat.completions.create(model=MODEL, messages=messages, max_tokens=8, temperature=0)
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached is not None
    assert 64 <= cached < second.usage.prompt_tokens


async def test_completions_echo_and_several_prompts(api: Api) -> None:
    options: Any = {"max_tokens": 8, "temperature": 0}
    done = await api.openai.completions.create(model=MODEL, prompt=["the river", "the stone"], echo=True, **options)
    assert [choice.text.startswith(start) for choice, start in zip(done.choices, ("the river", "the stone"), strict=True)] == [True, True]
    checked = await api.checked_completion(prompt="the river", **options)
    assert "the river" + checked.text[0] == done.choices[0].text


async def test_log_probabilities(api: Api) -> None:
    options: Any = {"messages": HELLO, "max_tokens": 10, "temperature": 0, "logprobs": True, "top_logprobs": 4}
    plain = (await api.openai.chat.completions.create(model=MODEL, **options)).choices[0]
    assert plain.logprobs is not None
    content = plain.logprobs.content
    assert content is not None
    assert len(content) == 10
    for position in content:
        assert len(position.top_logprobs) == 4
        assert position.logprob == max(entry.logprob for entry in position.top_logprobs)  # greedy
    assert "".join(position.token for position in content) == plain.message.content
    streamed = await api.checked_chat(**options)
    entries = [entry for chunk in streamed.chunks for entry in (chunk["choices"][0].get("logprobs") or {}).get("content", [])]
    assert [entry["token"] for entry in entries] == [position.token for position in content]
    assert [entry["logprob"] for entry in entries] == pytest.approx([position.logprob for position in content], abs=1e-4)


async def test_several_answers_and_their_seeds(api: Api) -> None:
    options: Any = {"messages": HELLO, "max_tokens": 8, "temperature": 1}
    three = await api.openai.chat.completions.create(model=MODEL, n=3, seed=11, **options)
    assert [choice.index for choice in three.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in three.choices}) == 3
    alone = await api.openai.chat.completions.create(model=MODEL, seed=11, **options)
    assert alone.choices[0].message.content == three.choices[0].message.content
    checked = await api.checked_chat(choices=3, n=3, seed=11, **options)
    assert [checked.text[index] for index in range(3)] == [choice.message.content for choice in three.choices]


async def test_a_stop_string_is_never_shown(api: Api) -> None:
    options: Any = {"messages": HELLO, "max_tokens": 30, "temperature": 0}
    whole = (await api.openai.chat.completions.create(model=MODEL, **options)).choices[0].message.content
    assert whole
    stop = whole[len(whole) // 2 : len(whole) // 2 + 5]
    before = whole[: whole.index(stop)]
    plain = (await api.openai.chat.completions.create(model=MODEL, stop=[stop], **options)).choices[0]
    assert (plain.message.content, plain.finish_reason) == (before, "stop")
    checked = await api.checked_chat(stop=[stop], **options)
    assert (checked.text[0], checked.finish_reasons[0]) == (before, "stop")
    kept = await api.checked_chat(stop=[stop], include_stop_str_in_output=True, **options)
    assert kept.text[0] == before + stop


async def test_token_options(api: Api) -> None:
    tokens = (await api.http.post(api.openai.base_url.join("/tokenize").__str__(), json={"model": MODEL, "prompt": " river"})).json()[
        "tokens"
    ]
    biased = await api.openai.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=4, temperature=0, logit_bias={str(tokens[0]): 100}, extra_body={"return_token_ids": True}
    )
    assert biased.choices[0].model_extra is not None
    assert biased.choices[0].model_extra["token_ids"] == [tokens[0]] * 4
    ends = await api.openai.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=20, temperature=0, logit_bias={"2": 100}, extra_body={"min_tokens": 3}
    )
    assert ends.usage is not None
    assert (ends.choices[0].finish_reason, ends.usage.completion_tokens) == ("stop", 4)
    forever = await api.openai.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=6, temperature=0, logit_bias={"2": 100}, extra_body={"ignore_eos": True}
    )
    assert forever.usage is not None
    assert (forever.choices[0].finish_reason, forever.usage.completion_tokens) == ("length", 6)


# ------------------------------------------------------------------------------------------------------- structure and tools


@pytest.mark.parametrize("stream", [False, True])
async def test_json_schema_output_is_valid(api: Api, stream: bool) -> None:
    options: Any = {
        "messages": HELLO,
        "max_tokens": 100,
        "temperature": 1,
        "seed": 3,
        "response_format": {"type": "json_schema", "json_schema": {"name": "things", "schema": SCHEMA}},
    }
    if stream:
        text = (await api.checked_chat(**options)).text[0]
    else:
        text = (await api.openai.chat.completions.create(model=MODEL, **options)).choices[0].message.content or ""
    answer = json.loads(text)
    assert answer["colour"] in ("red", "green")
    assert answer["count"] in (1, 2, 3)


async def test_choices_and_regular_expressions(api: Api) -> None:
    for constraint, allowed in (({"choice": ["yes", "no"]}, {"yes", "no"}), ({"regex": "[ab]c"}, {"ac", "bc"})):
        done = await api.openai.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=20, temperature=1, extra_body={"structured_outputs": constraint}
        )
        assert done.choices[0].message.content in allowed


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
async def test_an_agent_loop_with_a_tool(api: Api, choice: Any) -> None:
    messages: Any = [{"role": "user", "content": "What is the weather?"}]
    options: Any = {"tools": [WEATHER], "max_tokens": 200, "temperature": 1, "seed": 4, "parallel_tool_calls": False}
    asked = await api.openai.chat.completions.create(model=MODEL, messages=messages, tool_choice=choice, **options)
    calls = asked.choices[0].message.tool_calls
    assert calls
    call: Any = calls[0]
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    messages += [asked.choices[0].message.model_dump(include={"role", "content", "tool_calls"})]
    messages += [{"role": "tool", "tool_call_id": each.id, "content": "sunny"} for each in calls]
    last = await api.openai.chat.completions.create(model=MODEL, messages=messages, **{**options, "max_tokens": 8})
    assert last.choices[0].message.content is not None

    streamed = await api.checked_chat(messages=messages[:1], tool_choice=choice, **options)
    arguments = "".join(
        (each.get("function") or {}).get("arguments") or ""
        for chunk in streamed.chunks
        for each in chunk["choices"][0]["delta"].get("tool_calls") or []
        if each["index"] == 0
    )
    assert json.loads(arguments)["city"] in ("Paris", "Rome")


async def test_tools_that_the_model_does_not_call(api: Api) -> None:
    checked = await api.checked_chat(messages=HELLO, tools=[WEATHER], tool_choice="auto", max_tokens=8, temperature=0)
    assert checked.text[0]


# ------------------------------------------------------------------------------------------------------------------- errors


async def test_errors_are_the_clients_own_classes(api: Api) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        await api.openai.chat.completions.create(model="nope", messages=HELLO)
    assert unknown.value.code == "unknown_model"
    with pytest.raises(openai.BadRequestError) as wrong:
        await api.openai.chat.completions.create(model=MODEL, messages=HELLO, temperature=-1)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="2048"):
        await api.openai.completions.create(model=MODEL, prompt=[7] * 3000)
    with pytest.raises(openai.BadRequestError, match="prompt_logprobs"):
        await api.openai.completions.create(model=MODEL, prompt="x", max_tokens=4, extra_body={"prompt_logprobs": 1})
    with pytest.raises(openai.BadRequestError):
        await api.openai.chat.completions.create(
            model=MODEL,
            messages=HELLO,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}},
        )


# --------------------------------------------------------------------------------------------------- Responses and Messages


async def test_responses(api: Api) -> None:
    options: Any = {"model": MODEL, "input": "Tell me about the river.", "max_output_tokens": 12, "temperature": 0}
    plain = await api.openai.responses.create(**options)
    assert plain.output_text
    deltas: list[str] = []
    kinds: list[str] = []
    async for event in await api.openai.responses.create(stream=True, **options):
        kinds.append(event.type)
        if event.type == "response.output_text.delta":
            deltas.append(event.delta)
    assert "".join(deltas) == plain.output_text
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    assert kinds.count("response.completed") == 1


async def test_messages(api: Api) -> None:
    options: Any = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Tell me about the river."}],
        "max_tokens": 12,
    }
    greedy: Any = {"temperature": 0}
    plain = await api.anthropic.messages.create(**options, extra_body=greedy)
    block: Any = plain.content[0]
    assert block.text
    assert plain.usage.output_tokens == 12
    assert plain.stop_reason == "max_tokens"
    async with api.anthropic.messages.stream(**options, extra_body=greedy) as stream:
        assert "".join([text async for text in stream.text_stream]) == block.text
    raw = events_in((await api.http.post("messages", json={**options, **greedy, "stream": True})).text)
    assert [event.kind for event in raw].count("message_stop") == 1
    counted = await api.anthropic.messages.count_tokens(model=MODEL, messages=options["messages"])
    assert counted.input_tokens == plain.usage.input_tokens
    with pytest.raises(anthropic.NotFoundError):
        await api.anthropic.messages.create(**{**options, "model": "nope"})


async def test_messages_with_a_tool(api: Api) -> None:
    function = WEATHER["function"]
    tool: Any = {"name": function["name"], "description": function["description"], "input_schema": function["parameters"], "strict": True}
    messages: Any = [{"role": "user", "content": "What is the weather?"}]
    asked = await api.anthropic.messages.create(
        model=MODEL, messages=messages, tools=[tool], tool_choice={"type": "any", "disable_parallel_tool_use": True}, max_tokens=200
    )
    uses: list[Any] = [block for block in asked.content if block.type == "tool_use"]
    assert uses
    assert uses[0].input["city"] in ("Paris", "Rome")
    assert asked.stop_reason == "tool_use"
    messages += [{"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in asked.content]}]
    messages += [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "sunny"} for use in uses]}]
    last = await api.anthropic.messages.create(model=MODEL, messages=messages, tools=[tool], max_tokens=8)
    assert last.content


# ----------------------------------------------------------------------------------------------------- workers that come and go


async def test_a_json_answer_goes_on_when_its_decode_worker_was_killed(api: Api) -> None:
    """On the one that takes its place: the grammar stands where it stood, and the text is the undisturbed one."""
    things = {"type": "array", "items": {"type": "string", "enum": ["red", "green"]}, "minItems": 80, "maxItems": 80}
    schema = {"type": "object", "properties": {"things": things}, "required": ["things"], "additionalProperties": False}
    response_format = {"type": "json_schema", "json_schema": {"name": "list", "schema": schema}}
    options: Any = {"model": MODEL, "messages": HELLO, "max_tokens": 1000, "temperature": 0, "response_format": response_format}
    undisturbed = (await api.openai.chat.completions.create(**options)).choices[0].message.content or ""
    worker, text = api.worker("decode-1"), ""
    async for chunk in await api.openai.chat.completions.create(**options, stream=True):
        text += chunk.choices[0].delta.content or ""
        if text.count("e") > 10 and worker.is_running():
            worker.kill()
            await asyncio.to_thread(worker.wait)
    assert not worker.is_running()
    assert text == undisturbed
    assert len(json.loads(text)["things"]) == 80


async def test_nobody_sees_that_the_workers_drain_under_load(api: Api) -> None:
    """There is one of each, so requests wait for the next."""
    expected = [await answer_to(api, number) for number in range(4)]
    answers: list[tuple[int, str]] = []
    is_over = asyncio.Event()

    async def ask(number: int) -> None:
        while not is_over.is_set():
            answers.append((number, await answer_to(api, number)))

    async def drain(name: str) -> None:
        before = api.worker(name)
        command = [sys.executable, "-m", "jetwake.deploy.cli", "drain", name]
        assert await (await asyncio.create_subprocess_exec(*command, env=api.environment)).wait() == 0
        await asyncio.to_thread(before.wait, 60)

    async with asyncio.TaskGroup() as tasks:
        for number in range(4):
            tasks.create_task(ask(number))
        while len(answers) < 8:
            await asyncio.sleep(0.05)
        await asyncio.gather(drain("decode-1"), drain("prefill-1"))
        had = len(answers)
        while len(answers) < had + 8:
            await asyncio.sleep(0.05)
        is_over.set()
    assert all(answer == expected[number] for number, answer in answers)


async def answer_to(api: Api, number: int) -> str:
    said: Any = [{"role": "user", "content": f"Tell me about the river of number {number}."}]
    done = await api.openai.chat.completions.create(model=MODEL, messages=said, max_tokens=60, temperature=0)
    return done.choices[0].message.content or ""
