"""A gateway is killed in the middle of a stream, and its client goes on at the other: every process is one of the commands' own."""

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from stream_checker import Event, check_chat, events_in

from fleet import Fleet
from jetwake.consumers.timing import PolynomialTiming
from jetwake.deploy.demo_model import fetch
from jetwake.deploy.local import wait_until_served
from jetwake.deploy.nats_server import NatsServer
from jetwake.pipeline.settings import BrokerSettings

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]

MODEL = "sim"
TOKENS = 300
TIMES = 2
SLOW_ENOUGH = PolynomialTiming((0.0, 0.0, 1.0), (0.0, 0.0, 10.0))
"""A token every 10 ms: an answer takes 3 s, and is cut off in its middle."""


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
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def cut_off(http: httpx.AsyncClient, url: str, body: dict[str, Any], process: asyncio.subprocess.Process) -> list[Event]:
    """What came until the gateway was killed. The last event may have come in part, and a client forgets that."""
    received = b""
    with pytest.raises(httpx.RemoteProtocolError):
        async with http.stream("POST", f"{url}/chat/completions", json=body) as response:
            assert response.status_code == 200
            async for part in response.aiter_bytes():
                received += part
                if received.count(b"\n\n") > TOKENS // 5 and process.returncode is None:
                    os.kill(process.pid, signal.SIGKILL)
    return events_in(received[: received.rindex(b"\n\n") + 2].decode())


@pytest.mark.parametrize("number", range(TIMES))
async def test_a_stream_whose_gateway_is_killed_goes_on_at_another(broker: str, tmp_path: Path, number: int) -> None:
    async with (
        gateway_process(broker, f"second-{number}", tmp_path) as (_, second),
        gateway_process(broker, f"first-{number}", tmp_path) as (victim, first),
        httpx.AsyncClient(timeout=60) as http,
    ):
        body = asked(number)
        begun = await cut_off(http, first, body, victim)
        last = begun[-1].id
        assert 0 < int(re.split("[:e.]", last)[1]) < TOKENS
        response = await http.get(f"{second}/requests/{last.partition(':')[0]}/stream", headers={"Last-Event-ID": last})
        assert response.status_code == 200, response.text
        resumed = events_in(response.text)
        whole = await http.post(f"{second}/chat/completions", json={**body, "stream": False, "stream_options": None})

    ids = [event.id for event in (*begun, *resumed)]
    assert len(set(ids)) == len(ids)
    told = check_chat([*begun, *resumed])
    assert "".join(text_in(event) for event in (*begun, *resumed)) == whole.json()["choices"][0]["message"]["content"]
    assert told is None or told
    usage = [event.data["usage"] for event in resumed if event.data and event.data.get("usage")]
    assert usage[-1]["completion_tokens"] == TOKENS


def text_in(event: Event) -> str:
    choices = (event.data or {}).get("choices") or [{}]
    return choices[0].get("delta", {}).get("content") or ""
