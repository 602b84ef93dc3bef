"""What `jetwake status` and the logs say of a system that is not well: who has no peer, which queue stands, and who routes."""

import asyncio
import logging

import pytest
from fleet import fleet_of
from operations import PATIENCE_S, patient, prompt_of

from jetwake.consumers import peers
from jetwake.deploy.nats_server import NatsServer
from jetwake.deploy.status import print_status, read_status
from jetwake.pipeline.connection import Bus
from jetwake.pipeline.jetstream import api
from jetwake.pipeline.topology import durables
from jetwake.producers import standing_queues
from jetwake.schemas.streams import HANDOFF

FAR_ON = "2100-01-01T00:00:00Z"


async def test_a_worker_without_a_compatible_peer_a_queue_that_stands_and_the_routers_are_named(
    own_server: NatsServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """The queue stands because its consumer is paused, and goes on when that is over."""
    caplog.set_level(logging.WARNING)  # whatever libraries set in this process before
    monkeypatch.setattr(peers, "ALONE_AFTER_S", 0.5)
    monkeypatch.setattr(standing_queues, "LOOK_EVERY_S", 0.5)
    async with fleet_of(own_server.url, prefill=1, decode=1) as (fleet, client), Bus.connect(patient(fleet.broker), "operator") as bus:
        fleet.start_router("router-2", policy="kv_aware")
        fleet.start_worker("prefill", "stranger", block_size_tokens=32)
        [durable] = await durables(bus, HANDOFF.name)
        pause = f"CONSUMER.PAUSE.{HANDOFF.name}.{durable}"
        await api(bus, pause, {"pause_until": FAR_ON})
        submitted = await client.submit(prompt_of(1), max_tokens=3, temperature=0.0)
        async with asyncio.timeout(PATIENCE_S):
            status = await read_status(fleet.broker)
            while not status["standing_queues"] or len(status["routers"]) < 2 or "stranger" not in status["without_peers"]:
                status = await read_status(fleet.broker)
            while "stands still: 1 wait" not in caplog.text or "stranger gets no work" not in caplog.text:
                await asyncio.sleep(0.05)
        [what] = status["standing_queues"].values()
        assert what == "1 wait and none is delivered, though decode-1 has room"
        assert status["without_peers"] == {"stranger": "decode-1 has block_size_tokens 16, not 32"}
        assert [(router["router"], router["policy"]) for router in status["routers"]] == [
            ("router-1", "least_loaded"),
            ("router-2", "kv_aware"),
        ]
        print_status(status, as_json=False)
        printed = capsys.readouterr().out
        assert all(word in printed for word in ("router-2", "stands still", "gets no work"))
        await api(bus, pause, {"pause_until": "2000-01-01T00:00:00Z"})
        async with asyncio.timeout(PATIENCE_S):
            assert len((await submitted.answer()).token_ids) == 3
