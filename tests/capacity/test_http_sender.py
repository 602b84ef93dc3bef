"""The OpenAI endpoint as a bench sees it: a small server that answers as vLLM's does."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from jetwake.deploy.live_senders import http_sender
from jetwake.schemas.errors import Overloaded, RequestFailed, SetupError

pytest.importorskip("httpx")


class Endpoint:
    """`/v1/models`, and `/v1/completions` with streams: what the prompt begins with says how it goes."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = next((int(line.split(":")[1]) for line in head.splitlines() if line.startswith("content-length:")), 0)
        body = json.loads(await reader.readexactly(length)) if length else {}
        if head.startswith("get /v1/models "):
            writer.write(self._reply(200, json.dumps({"data": [{"id": "m", "max_model_len": 512}]})))
        elif body["prompt"][0] == 9:
            writer.write(self._reply(429, "too many"))
        else:
            self.bodies.append(body)
            writer.write(self._reply(200, "".join(f"data: {line}\n\n" for line in self._stream(body))))
        await writer.drain()
        writer.close()

    def _reply(self, status: int, text: str) -> bytes:
        return f"HTTP/1.1 {status} x\r\ncontent-length: {len(text)}\r\nconnection: close\r\n\r\n{text}".encode()

    def _stream(self, body: dict[str, Any]) -> list[str]:
        if body["prompt"][0] == 8:
            return [json.dumps({"error": {"message": "the worker died"}})]
        chunks: list[dict[str, Any]] = [{"choices": [{"text": "a", "token_ids": [5]}]}, {"choices": [{"text": "bc", "token_ids": [6, 7]}]}]
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
        return [json.dumps(chunk) for chunk in (*chunks, {"choices": [], "usage": usage})] + ["[DONE]"]


@pytest.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    endpoint = Endpoint()
    server = await asyncio.start_server(endpoint.serve, "127.0.0.1", 0)
    endpoint.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield endpoint


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/"])
async def test_token_ids_go_out_and_tokens_are_counted(endpoint: Endpoint, path: str) -> None:
    heard = list[int]()
    async with http_sender(endpoint.url + path, None, 10) as sender:
        assert (sender.model.name, sender.model.limit_tokens) == ("m", 512)
        sent = await sender.send([1, 2, 3], 3, heard.append)
    assert heard == [1, 2]
    assert (sent.output_tokens, sent.cached_tokens) == (3, 2)
    [body] = endpoint.bodies
    assert (body["prompt"], body["max_tokens"], body["ignore_eos"], body["stream"]) == ([1, 2, 3], 3, True, True)


async def test_refusals_and_broken_streams_are_errors(endpoint: Endpoint) -> None:
    async with http_sender(endpoint.url, "m", 10) as sender:
        with pytest.raises(Overloaded, match="too many"):
            await sender.send([9], 3, lambda _: None)
        with pytest.raises(RequestFailed, match="the worker died"):
            await sender.send([8], 3, lambda _: None)


async def test_another_model(endpoint: Endpoint) -> None:
    with pytest.raises(SetupError, match="--model must be one of: m"):
        async with http_sender(endpoint.url, "other", 10):
            pass
