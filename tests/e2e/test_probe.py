"""Links between real worker processes, measured by real transfers: the matrix, a broken one, busy workers, and what is left behind."""

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from jetwake.consumers.link_probe import BLOCK_BYTES, NUM_BLOCKS
from jetwake.deploy.capacity.link_model import fitted, read_link_model
from jetwake.deploy.nats_server import NatsServer
from jetwake.deploy.probe import PairProbed, judged
from jetwake.pipeline.connection import Bus
from jetwake.pipeline.registry import Registry
from jetwake.pipeline.settings import BrokerSettings, TopologySettings
from jetwake.pipeline.topology import ensure_topology
from jetwake.producers.client import Client
from jetwake.schemas import subjects
from jetwake.schemas.codec import decode, encode
from jetwake.schemas.link_probe import LinkProbe, LinkProbed

pytest.importorskip("nixl")

SLOW = "timing=dynamo-default"


async def process(*words: str, url: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "jetwake.deploy.cli", *words, "--nats-url", url, stdout=asyncio.subprocess.PIPE, env=os.environ
    )


@pytest.fixture(scope="module")
async def url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """One router, one prefill worker, and two decode workers, one of them in another domain."""
    engine = ("--engine", "simulated", "--model", "m", "--engine-option", SLOW)
    async with NatsServer(tmp_path_factory.mktemp("nats"), sync_always=False) as server:
        async with Bus.connect(BrokerSettings(url=server.url), "topology") as bus:
            await ensure_topology(bus, TopologySettings())
        workers = [
            await process("router", url=server.url),
            await process("prefill", "--domain", "a", *engine, url=server.url),
            await process("decode", "--domain", "a", *engine, url=server.url),
            await process("decode", "--name", "decode-2", "--domain", "b", *engine, url=server.url),
        ]
        try:
            async with Bus.connect(BrokerSettings(url=server.url), "test") as bus:
                registry = Registry(bus)
                await registry.start()
                following = asyncio.create_task(registry.run())
                await registry.wait_for(
                    lambda there: len(there) == 3 and all(card.peers for card in there.values() if card.role == "decode"), 60.0
                )
                following.cancel()
            yield server.url
        finally:
            for worker in workers:
                worker.terminate()
            await asyncio.gather(*(worker.wait() for worker in workers))


async def probed(url: str, *words: str) -> tuple[int | None, list[dict[str, Any]]]:
    running = await process("probe", "--json", *words, url=url)
    told, _ = await running.communicate()
    return running.returncode, json.loads(told)["pairs"]


async def ask(bus: Bus, worker: str, **facts: Any) -> LinkProbed:
    answer = await bus.request(subjects.probe(worker), encode(LinkProbe.model_validate(facts)), timeout_s=30.0)
    return decode(answer.data, LinkProbed)


async def test_the_matrix_is_a_link_model_of_a_replay(url: str, tmp_path: Path) -> None:
    code, pairs = await probed(url, "--slow", "0", "--save", str(tmp_path / "links.json"))
    assert code == 0
    assert [(pair["prefill"], pair["decode"], pair["decode_domain"], pair["state"]) for pair in pairs] == [
        ("prefill-1", "decode-1", "a", "ok"),
        ("prefill-1", "decode-2", "b", "ok"),
    ]
    assert all(pair["gbytes_per_s"] > 0.01 and 0 < pair["latency_ms"] < 1000 for pair in pairs)
    options = read_link_model(tmp_path / "links.json").options()
    assert (options.gbytes_per_s, options.between_gbytes_per_s, options.domains) == (pairs[0]["gbytes_per_s"], pairs[1]["gbytes_per_s"], 2)


async def test_a_buffer_is_there_for_one_probe_and_goes_with_it(url: str) -> None:
    async with Bus.connect(BrokerSettings(url=url), "test") as bus:
        opened = await ask(bus, "prefill-1", step="open", probe="first", pattern=5)
        assert opened.refused == ""
        assert (await ask(bus, "prefill-1", step="open", probe="second")).refused == "another probe is under way"
        place = {"host": opened.host, "port": opened.port, "engine_id": opened.engine_id}
        pulled = await ask(bus, "decode-1", step="pull", probe="first", pattern=5, **place)
        assert (pulled.broken, pulled.sizes[-1].size_bytes) == ("", NUM_BLOCKS * BLOCK_BYTES)
        other = await ask(bus, "decode-1", step="pull", probe="first", pattern=6, **place)
        assert other.broken == "bytes arrived that are not those that were sent"
        await ask(bus, "prefill-1", step="close", probe="second")
        with socket.create_connection((opened.host, opened.port)):
            pass
        await ask(bus, "prefill-1", step="close", probe="first")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((opened.host, opened.port))
        gone = await ask(bus, "decode-1", step="pull", probe="first", pattern=5, **place)
        assert "no handshake" in gone.broken


async def test_busy_workers_are_left_alone_unless_forced(url: str) -> None:
    async def refusal(bus: Bus, worker: str, force: bool = False) -> str:
        opened = await ask(bus, worker, step="open", probe="x", force=force)
        await ask(bus, worker, step="close", probe="x")
        return opened.refused

    async with Client.connect(BrokerSettings(url=url)) as client, Bus.connect(BrokerSettings(url=url), "test") as bus:
        working = asyncio.create_task(client.generate([1, 2, 3], model="m", max_tokens=20_000, ignore_eos=True, timeout_s=300.0))
        async with asyncio.timeout(60):
            while not (busy := [name for name in ("decode-1", "decode-2") if await refusal(bus, name) == "busy: 1 requests in hand"]):
                assert not working.done()
                await asyncio.sleep(0.1)
        assert await refusal(bus, busy[0], force=True) == ""
        working.cancel()


def test_slow_links_are_those_far_below_the_median() -> None:
    def pair(number: int, gbytes_per_s: float) -> PairProbed:
        return PairProbed("p", f"d{number}", "", "", "ok", gbytes_per_s=gbytes_per_s)

    states = [found.state for found in judged([pair(1, 10.0), pair(2, 9.0), pair(3, 4.0), pair(4, 11.0)], 0.5)]
    assert states == ["ok", "ok", "slow", "ok"]


def test_the_fit_finds_bandwidth_and_latency() -> None:
    sizes = [1 << power for power in (16, 18, 20, 22, 24)]
    bytes_per_s, latency_s = fitted(sizes, [0.0003 + size / 5e9 for size in sizes])
    assert bytes_per_s == pytest.approx(5e9)
    assert latency_s == pytest.approx(0.0003)
