"""A gateway in this process, as the command composes it, and plain HTTP calls to it."""

import asyncio
import atexit
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import httpx

from jetwake.deploy.gateway import run_gateway
from jetwake.pipeline.settings import BrokerSettings, TopologySettings
from jetwake.pipeline.telemetry import Telemetry, telemetry
from jetwake.producers.gateway.settings import GatewaySettings


@dataclass
class RunningGateway:
    """`http` speaks to the public port, `admin` to the other."""

    url: str
    http: httpx.AsyncClient
    admin: httpx.AsyncClient

    async def chat(self, model: str, text: str = "hello", headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0, **fields}
        return await self.http.post("/v1/chat/completions", json=body, headers=headers)

    async def completion(self, model: str, prompt: Any = "hello", **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0, **fields})


@cache
def _telemetry() -> Telemetry:
    """Of the whole test process: there is one in each process."""
    begun = telemetry("gateway", "tests", keeps_text=True)
    told = begun.__enter__()
    atexit.register(begun.__exit__, None, None, None)
    return told


def metrics_text() -> bytes:
    return _telemetry().metrics_text()


@asynccontextmanager
async def gateway_of(url: str, **settings: Any) -> AsyncGenerator[RunningGateway]:
    """Yields when it serves."""
    _telemetry()
    stopping = asyncio.Event()
    ready: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()
    made = GatewaySettings(**{"name": "gateway-t", "port": 0, "model_timeout_s": 30.0, **settings})
    serving = asyncio.create_task(
        run_gateway(
            made,
            BrokerSettings(url=url),
            TopologySettings(),
            stopping,
            lambda *urls: ready.set_result(urls),
            metrics_text=metrics_text,
        )
    )
    await asyncio.wait({serving, ready}, return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        serving.result()
    public, admin = ready.result()
    try:
        async with (
            httpx.AsyncClient(base_url=public.removesuffix("/v1"), timeout=60) as http,
            httpx.AsyncClient(base_url=admin, timeout=60) as admin_http,
        ):
            yield RunningGateway(public, http, admin_http)
    finally:
        stopping.set()
        await serving
