"""The link that faults are done to: what it passes on, loses, doubles and reorders, and that a connection outlives silence."""

import asyncio
from pathlib import Path

import pytest

from jetwake.deploy.certificates import client_files, write_certificates
from jetwake.deploy.chaos.links import SHARE, Disturbance, Link, is_disturbed
from jetwake.deploy.nats_folder import tls_of
from jetwake.deploy.nats_server import NatsServer
from jetwake.pipeline.connection import Bus
from jetwake.pipeline.settings import BrokerSettings


@pytest.mark.parametrize(
    ("frame", "expected"),
    [
        (b"PUB jw.kv.w 3\r\nabc\r\n", True),
        (b"HPUB jw.replies.g.r 12 15\r\nNATS/1.0\r\n\r\nabc\r\n", True),
        (b"PUB jw.replies.g.r _INBOX.1 3\r\nabc\r\n", False),
        (b"PUB jw.requests.m.interactive _INBOX.1 3\r\nabc\r\n", False),
        (b"PUB jw.release.w 3\r\nabc\r\n", False),
        (b"SUB jw.kv.* 1\r\n", False),
        (b"PING\r\n", False),
        (b"\r\n", False),
    ],
)
def test_only_plain_messages_that_may_be_lost_are_disturbed(frame: bytes, expected: bool) -> None:
    assert is_disturbed(frame) is expected


@pytest.mark.parametrize("manner", ["lose", "double", "reorder"])
def test_each_manner_does_what_its_name_says(manner: str) -> None:
    frames = [f"PUB jw.kv.w 4\r\n{number:04d}\r\n".encode() for number in range(1000)]
    disturbance = Disturbance(manner, 0.5)
    sent = b"".join(disturbance.pass_on(frame) for frame in frames) + disturbance.rest()
    numbers = [int(part.split(b"\r\n")[1]) for part in sent.split(b"PUB ")[1:]]
    assert numbers != list(range(1000))
    if manner == "reorder":
        assert sorted(numbers) == list(range(1000))
    elif manner == "double":
        assert sorted(set(numbers)) == list(range(1000))
        assert 1000 * (1 + SHARE / 2) < len(numbers) < 1000 * (1 + SHARE * 2)
    else:
        assert len(set(numbers)) == len(numbers)
        assert 1000 * (1 - SHARE * 2) < len(numbers) < 1000 * (1 - SHARE / 2)


@pytest.mark.parametrize("is_tls", [False, True])
async def test_a_silent_link_passes_on_what_it_held_and_a_cut_one_connects_again(tmp_path: Path, unique: str, is_tls: bool) -> None:
    if is_tls:
        write_certificates(tmp_path, ["127.0.0.1"], days=1)
    tls, files = tls_of(tmp_path, tmp_path), client_files(tmp_path)
    async with (
        NatsServer(tmp_path / "nats", sync_always=False, tls=tls) as server,
        Link("test", server.port, tls=tls) as link,
        Bus.connect(BrokerSettings(url=link.url, tls_ca=files["CA"], tls_cert=files["CERT"], tls_key=files["KEY"]), "behind") as bus,
    ):
        heard: asyncio.Queue[bytes] = asyncio.Queue()
        await bus.subscribe(unique, lambda message: heard.put_nowait(message.data))
        await bus.flush()
        link.silence()
        await bus.publish(unique, b"held")
        link.heal()
        async with asyncio.timeout(10):
            assert await heard.get() == b"held"
        link.cut()
        async with asyncio.timeout(10):
            while bus.connected:
                await asyncio.sleep(0.01)
        link.heal()
        async with asyncio.timeout(10):
            await bus.wait_connected()
            await bus.flush()
            await bus.publish(unique, b"again")
            assert await heard.get() == b"again"
