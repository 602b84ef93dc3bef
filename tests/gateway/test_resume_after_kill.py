"""A gateway process is killed in the middle of its streams, and their clients go on at another one: without a gap, without a repeat."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fleet import Fleet
from stream_checker import check_chat, events_in

from jetwake.consumers.timing import PolynomialTiming
from jetwake.deploy.demo_model import fetch
from jetwake.deploy.local import wait_until_served
from jetwake.deploy.nats_server import NatsServer
from jetwake.pipeline.settings import BrokerSettings
from jetwake.producers.gateway.positions import split_event_id

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]

MODEL = "sim"
TOKENS = 300
STREAMS = 10
SLOW_ENOUGH = PolynomialTiming((0.0, 0.0, 1.0), (0.0, 0.0, 25.0))
"""A token every 25 ms: an answer takes 7.5 s, and is cut off in its middle, also where this process gets no turn for seconds."""


@asynccontextmanager
async def gateway_process(url: str, name: str, folder: Path) -> AsyncGenerator[tuple[asyncio.subprocess.Process, str]]:
    """The process and its URL, once it serves."""
    ready = folder / f"{name}.ready"
    ready.unlink(missing_ok=True)
    own = ["gateway", "--name", name, "--model", MODEL, "--port", "0", "--nats-url", url, "--no-over-nats", "--ready-file", str(ready)]
    with (folder / f"{name}.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(sys.executable, "-m", "jetwake.deploy.cli", *own, stdout=log, stderr=log)
    try:
        while not ready.exists():
            assert process.returncode is None, (folder / f"{name}.log").read_text()
            await asyncio.sleep(0.1)
        yield process, json.loads(ready.read_text())["url"]
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.fixture(scope="module")
async def broker(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """With workers that answer."""
    tokenizer = str(await asyncio.to_thread(fetch, "tiny"))
    async with NatsServer(tmp_path_factory.mktemp("nats"), sync_always=False) as server:
        fleet = Fleet(BrokerSettings(url=server.url))
        engine: dict[str, Any] = {"model": MODEL, "tokenizer": tokenizer, "vocabulary_size": 2048, "timing": SLOW_ENOUGH}
        fleet.start_router()
        fleet.start_worker("prefill", "prefill-1", **engine)
        fleet.start_worker("decode", "decode-1", **engine)
        try:
            await wait_until_served(fleet.broker, MODEL)
            yield server.url
            await fleet.stop_all()
        finally:
            await fleet.kill_all()


def asked(number: int) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"story {number}"}],
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }


STREAMED: Any = {"stream": True, "stream_options": {"include_usage": True}}


class Victim:
    """Killed when one of the streams through it has had so many events: others have had fewer, or more."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, after_events: int) -> None:
        self.url = url
        self._process = process
        self._after_events = after_events

    def look_at(self, received: bytes) -> None:
        if received.count(b"\n\n") >= self._after_events and self._process.returncode is None:
            os.kill(self._process.pid, signal.SIGKILL)


async def cut_off(http: httpx.AsyncClient, victim: Victim, number: int) -> str:
    """What came until the kill. The last event may have come in part, and a client forgets that."""
    received = b""
    async with http.stream("POST", f"{victim.url}/chat/completions", json={**asked(number), **STREAMED}) as response:
        assert response.status_code == 200
        with contextlib.suppress(httpx.RemoteProtocolError):
            async for part in response.aiter_bytes():
                received += part
                victim.look_at(received)
    assert b"[DONE]" not in received
    return received[: received.rindex(b"\n\n") + 2].decode()


async def one_stream(http: httpx.AsyncClient, victim: Victim, other: str, number: int) -> int:
    """After how many tokens it was cut."""
    begun = await cut_off(http, victim, number)
    last = events_in(begun)[-1].id
    response = await http.get(f"{other}/requests/{last.partition(':')[0]}/stream", headers={"Last-Event-ID": last})
    assert response.status_code == 200, response.text
    told = check_chat(begun + response.text, usage=True)
    whole = (await http.post(f"{other}/chat/completions", json=asked(number))).json()
    assert told.text[0] == whole["choices"][0]["message"]["content"]
    assert told.usage is not None
    assert told.usage["completion_tokens"] == TOKENS
    return split_event_id(last)[1].position.tokens


async def test_streams_whose_gateway_is_killed_go_on_at_another(broker: str, tmp_path: Path) -> None:
    async with (
        gateway_process(broker, "second", tmp_path) as (_, other),
        gateway_process(broker, "first", tmp_path) as (process, url),
        httpx.AsyncClient(timeout=60) as http,
    ):
        victim = Victim(process, url, after_events=TOKENS // 3)
        cuts = await asyncio.gather(*(one_stream(http, victim, other, number) for number in range(STREAMS)))
    assert all(0 < cut < TOKENS for cut in cuts)
