"""Ways to send one request to a running system and hear its tokens as they come: over NATS, and over the OpenAI endpoint."""

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ..pipeline.settings import BrokerSettings
from ..producers.client import Client
from ..schemas.errors import JetwakeError, Overloaded, RequestFailed, SetupError
from ..schemas.workers import ModelCard

if TYPE_CHECKING:
    import httpx

OnTokens = Callable[[int], None]
"""Called with how many new tokens have come, at the moment they come."""
HTTP_VOCABULARY = 1000
"""The endpoint does not tell how many tokens its model knows; every model knows so many."""
HTTP_BLOCK_SIZE_TOKENS = 64
"""Nor how large its KV blocks are; most sizes divide this."""


@dataclass(frozen=True)
class Sent:
    """What is known at the end of an answer. Over HTTP the workers are not."""

    output_tokens: int
    cached_tokens: int
    predicted_cached_tokens: int = 0
    prefill_worker: str = ""
    decode_worker: str = ""


@dataclass(frozen=True)
class LiveModel:
    name: str
    vocabulary_size: int
    limit_tokens: int
    block_size_tokens: int


class Sender(Protocol):
    model: LiveModel

    async def send(self, prompt: Sequence[int], max_tokens: int, on_tokens: OnTokens) -> Sent:
        """Raises JetwakeError when the request was refused or failed."""
        ...


class NatsSender:
    def __init__(self, client: Client, card: ModelCard, timeout_s: float) -> None:
        self.model = LiveModel(card.model, card.vocabulary_size, card.max_model_len_tokens, card.block_size_tokens)
        self._client = client
        self._timeout_s = timeout_s

    async def send(self, prompt: Sequence[int], max_tokens: int, on_tokens: OnTokens) -> Sent:
        submitted = await self._client.submit(
            list(prompt),
            model=self.model.name,
            max_tokens=max_tokens,
            temperature=0.0,
            ignore_eos=True,
            timeout_s=self._timeout_s,
        )
        async for piece in submitted:
            if piece.token_ids:
                on_tokens(len(piece.token_ids))
        answer = await submitted.answer()
        return Sent(
            len(answer.token_ids), answer.cached_tokens, answer.predicted_cached_tokens, answer.prefill_worker, answer.decode_worker
        )


@asynccontextmanager
async def nats_sender(broker: BrokerSettings, model: str | None, timeout_s: float) -> AsyncIterator[NatsSender]:
    async with Client.connect(broker) as client:
        yield NatsSender(client, await client.model(model), timeout_s)


class HttpSender:
    """Streams `/v1/completions` with token ids as the prompt. A chunk is as many tokens as it names, or one."""

    def __init__(self, http: "httpx.AsyncClient", model: LiveModel) -> None:
        self.model = model
        self._http = http

    async def send(self, prompt: Sequence[int], max_tokens: int, on_tokens: OnTokens) -> Sent:
        import httpx

        body = {
            "model": self.model.name,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        usage: dict[str, Any] = {}
        try:
            async with self._http.stream("POST", "v1/completions", json=body) as response:
                if response.status_code != 200:
                    await response.aread()
                    raise _refusal(response)
                async for chunk in _events(response):
                    usage = chunk.get("usage") or usage
                    for choice in chunk.get("choices") or []:
                        on_tokens(len(choice.get("token_ids") or ()) or 1)
        except httpx.HTTPError as error:
            raise RequestFailed(f"{type(error).__name__}: {error}", "http") from error
        if not usage:
            raise RequestFailed("the stream ended without its usage", "http")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return Sent(int(usage["completion_tokens"]), int(cached))


@asynccontextmanager
async def http_sender(url: str, model: str | None, timeout_s: float) -> AsyncIterator[HttpSender]:
    """Raises SetupError when nothing answers there, or without the package httpx."""
    try:
        import httpx
    except ImportError as error:
        raise SetupError("--http needs the package httpx: pip install httpx") from error
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
    base = url.rstrip("/").removesuffix("/v1") + "/"
    async with httpx.AsyncClient(base_url=base, timeout=timeout_s, limits=limits) as http:
        try:
            response = await http.get("v1/models")
            response.raise_for_status()
            models: list[dict[str, Any]] = response.json()["data"]
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError) as error:
            raise SetupError(f"no OpenAI endpoint answers at {url}: {error}") from error
        named = [one for one in models if model in (None, one["id"])]
        if len(named) != 1:
            raise SetupError(f"which model? --model must be one of: {', '.join(one['id'] for one in models)}")
        limit_tokens = int(named[0].get("max_model_len") or 0)
        if not limit_tokens:
            raise SetupError(f"{url} does not tell how many tokens {named[0]['id']} takes (max_model_len)")
        yield HttpSender(http, LiveModel(named[0]["id"], HTTP_VOCABULARY, limit_tokens, HTTP_BLOCK_SIZE_TOKENS))


async def _events(response: "httpx.Response") -> AsyncIterator[dict[str, Any]]:
    """Raises RequestFailed for an error in the stream."""
    async for line in response.aiter_lines():
        data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
        if data and data != "[DONE]":
            chunk = json.loads(data)
            if "error" in chunk:
                raise RequestFailed(str(chunk["error"].get("message", chunk["error"])), "http")
            yield chunk


def _refusal(response: "httpx.Response") -> JetwakeError:
    text = response.text[:300]
    return Overloaded(text) if response.status_code == 429 else RequestFailed(f"HTTP {response.status_code}: {text}", "http")
