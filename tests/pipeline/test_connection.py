"""The connection: what it refuses, what it survives, and what it says when it cannot go on."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from jetwake.deploy.chaos.freezing import freeze, thaw
from jetwake.deploy.chaos.links import Link
from jetwake.deploy.nats_server import NatsServer
from jetwake.pipeline.connection import Bus, RawMessage, encoded_headers_bytes
from jetwake.pipeline.hearing_client import HearingClient
from jetwake.pipeline.jetstream import delivery_facts, nak
from jetwake.pipeline.settings import BrokerSettings
from jetwake.schemas.errors import BrokerUnavailable, BusRejected, NotPermitted, PayloadTooLarge, SetupError, StreamMissing

from .harness import until


async def test_request_and_answer(bus: Bus, unique: str) -> None:
    def answer(message: RawMessage) -> None:
        tasks.append(asyncio.create_task(bus.publish(message.reply, message.data[::-1], {"Seen": message.headers["Sent"]})))

    tasks: list[asyncio.Task[None]] = []
    await bus.subscribe(unique, answer)
    reply = await bus.request(unique, b"abc", {"Sent": "yes"})
    assert (reply.data, reply.headers["Seen"]) == (b"cba", "yes")


async def test_nobody_there_is_said_at_once(bus: Bus, unique: str) -> None:
    with pytest.raises(StreamMissing):
        await bus.request(unique, b"")


async def test_silence_is_said_after_the_timeout(bus: Bus, unique: str) -> None:
    await bus.subscribe(unique, lambda _: None)
    with pytest.raises(BrokerUnavailable):
        await bus.request(unique, b"", timeout_s=0.05)


async def test_too_large_a_message_is_refused_and_the_connection_stays(bus: Bus, unique: str) -> None:
    for payload, headers in ((bytes(bus.max_payload_bytes + 1), None), (bytes(bus.max_payload_bytes - 3), {"A": "b"})):
        with pytest.raises(PayloadTooLarge):
            await bus.publish(unique, payload, headers)
    await bus.flush()
    assert bus.connected


async def test_a_callback_that_raises_hears_the_next_message(bus: Bus, unique: str) -> None:
    heard: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def callback(message: RawMessage) -> None:
        if message.data == b"bad":
            raise ValueError("bad")
        heard.set_result(message.data)

    await bus.subscribe(unique, callback)
    await bus.publish(unique, b"bad")
    await bus.publish(unique, b"good")
    async with asyncio.timeout(5):
        assert await heard == b"good"


async def test_leaving_twice_is_allowed(bus: Bus, unique: str) -> None:
    subscription = await bus.subscribe(unique, lambda _: None)
    await subscription.unsubscribe()
    await subscription.unsubscribe()


async def test_no_server_is_said_after_the_connect_timeout() -> None:
    with pytest.raises(BrokerUnavailable, match=r"127\.0\.0\.1:1"):
        await Bus.open(BrokerSettings(url="nats://127.0.0.1:1", connect_timeout_s=0.5), "test")


async def test_a_missing_credentials_file_is_a_setup_error(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="nothing"):
        await Bus.open(BrokerSettings(credentials=tmp_path / "nothing"), "test")


async def test_callbacks_run_after_each_reconnect_until_they_succeed(own_server: NatsServer) -> None:
    async with Bus.connect(BrokerSettings(url=own_server.url), "test") as bus:
        ran: list[str] = []
        done = asyncio.Event()

        async def failing() -> None:
            ran.append("failing")
            if ran.count("failing") < 3:
                raise BrokerUnavailable("not yet")
            done.set()

        async def good() -> None:
            ran.append("good")

        bus.on_reconnect(failing)
        bus.on_reconnect(good)
        await own_server.restart()
        async with asyncio.timeout(20):
            await done.wait()
        assert ran[:2] == ["failing", "good"]
        assert ran.count("failing") == 3
        assert ran.count("good") == 1


async def test_waiters_fail_at_once_when_the_broker_dies(own_server: NatsServer) -> None:
    async with Bus.connect(BrokerSettings(url=own_server.url), "test") as bus:
        await bus.subscribe("silent", lambda _: None)
        waiting = asyncio.create_task(bus.request("silent", b"", timeout_s=60))
        await bus.flush()
        await own_server.kill()
        async with asyncio.timeout(10):
            with pytest.raises(BrokerUnavailable):
                await waiting


async def test_a_connection_closed_for_good_says_so(own_server: NatsServer) -> None:
    async with Bus.connect(BrokerSettings(url=own_server.url), "test") as bus:
        failed = asyncio.create_task(bus.failed())
        # Only announced: what the broker leaves unread may cost us its last words.
        await bus._client._send_command(b"PUB x %d\r\n" % (bus.max_payload_bytes + 1))
        await bus._client._flush_pending()
        async with asyncio.timeout(10):
            with pytest.raises(BrokerUnavailable, match="closed for good"):
                await failed


USERS = """
authorization {
  users = [
    { user: limited, password: p, permissions: { publish: { allow: ["ok.>", "_INBOX.>"] }, subscribe: { allow: [">"] } } }
    { user: all, password: p }
  ]
}
"""


@pytest.fixture
async def guarded_server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    async with NatsServer(tmp_path, sync_always=False, extra_config=USERS) as server:
        yield server


async def test_a_forbidden_subject_fails_its_waiters_at_once(guarded_server: NatsServer) -> None:
    url = guarded_server.url.replace("//", "//limited:p@")
    async with Bus.connect(BrokerSettings(url=url), "test") as bus, asyncio.timeout(5):
        with pytest.raises(NotPermitted, match=r"jw\.prefill\.W2"):
            await bus.request("jw.prefill.W2", b"", timeout_s=60)
        assert bus.connected


async def test_a_wrong_password_is_not_permitted(guarded_server: NatsServer) -> None:
    url = guarded_server.url.replace("//", "//limited:wrong@")
    with pytest.raises(NotPermitted) as caught:
        await Bus.open(BrokerSettings(url=url, connect_timeout_s=3.0), "test")
    assert "wrong@" not in str(caught.value)


async def test_a_half_open_connection_is_noticed(own_server: NatsServer) -> None:
    settings = BrokerSettings(url=own_server.url, ping_interval_s=0.2)
    async with Bus.connect(settings, "test") as bus:
        await freeze(own_server.pid)
        try:
            await until(lambda: not bus.connected)
        finally:
            thaw(own_server.pid)
        async with asyncio.timeout(20):
            await bus.wait_connected()


async def test_a_silent_server_is_left_though_much_is_still_to_be_sent_to_it(nats_server: NatsServer, unique: str) -> None:
    """More than the sockets on the way take. The other address is as good."""
    async with Link("one", nats_server.port) as one, Link("other", nats_server.port) as other:
        settings = BrokerSettings(url=f"{one.url},{other.url}", ping_interval_s=0.1, request_timeout_s=0.3)
        async with Bus.connect(settings, "test") as bus:
            again = asyncio.Event()

            async def connected_again() -> None:
                again.set()

            bus.on_reconnect(connected_again)
            (one if one.is_used else other).silence()
            async with asyncio.timeout(20):
                while not again.is_set():
                    with suppress(BrokerUnavailable):  # it is noticed, and no more fits into the buffer
                        await bus.publish(unique, bytes(500_000))
                    await asyncio.sleep(0.001)
            await until_flushed(bus)


async def until_flushed(bus: Bus) -> None:
    """What waited for the connection is sent with it."""
    async with asyncio.timeout(20):
        while True:
            try:
                await bus.flush()
                return
            except BrokerUnavailable:
                await asyncio.sleep(0.01)


async def test_a_connection_that_is_closed_while_the_broker_is_frozen_does_not_come_back(own_server: NatsServer) -> None:
    async with Bus.connect(BrokerSettings(url=own_server.url), "watcher") as watcher:
        bus = await Bus.open(BrokerSettings(url=own_server.url, request_timeout_s=0.3), "leaver")
        await bus.subscribe("somebody", lambda _: None)
        await bus.flush()
        await freeze(own_server.pid)
        try:
            await bus.close()
        finally:
            thaw(own_server.pid)
        async with asyncio.timeout(10):
            while await somebody_listens(watcher):
                pass


async def somebody_listens(bus: Bus) -> bool:
    try:
        await bus.request("somebody", b"", timeout_s=0.2)
    except StreamMissing:
        return False
    except BrokerUnavailable:
        return True
    return True


def test_header_bytes_are_those_on_the_wire() -> None:
    assert encoded_headers_bytes(None) == 0
    assert encoded_headers_bytes({"Nats-Msg-Id": "r1"}) == len(b"NATS/1.0\r\nNats-Msg-Id: r1\r\n\r\n")


def test_facts_of_a_delivery() -> None:
    short = delivery_facts("$JS.ACK.JW_PREFILL.w1.2.17.5.1700000000000000001.3")
    long = delivery_facts("$JS.ACK.domain.account.JW_PREFILL.w1.2.17.5.1700000000000000001.3.token")
    assert short == long
    assert (short.stream, short.durable, short.deliveries, short.sequence, short.stored_ns) == (
        "JW_PREFILL",
        "w1",
        2,
        17,
        1700000000000000001,
    )
    with pytest.raises(BusRejected):
        delivery_facts("_INBOX.x")


def test_nak_carries_its_delay() -> None:
    assert (nak(0), nak(1.5)) == (b"-NAK", b'-NAK{"delay": 1500000000}')


async def test_a_cancelled_flush_leaves_the_connection_hearing(bus: Bus, unique: str) -> None:
    async with Bus.connect(bus.settings, "impatient") as impatient:
        for turns in range(8):
            flushing = asyncio.create_task(impatient.flush())
            for _ in range(turns):
                await asyncio.sleep(0)
            flushing.cancel()
            await asyncio.wait([flushing])
        heard: asyncio.Queue[RawMessage] = asyncio.Queue()
        await impatient.subscribe(unique, heard.put_nowait)
        await impatient.publish(unique, b"x")
        async with asyncio.timeout(5):
            assert (await heard.get()).data == b"x"


async def test_a_connection_that_was_silent_for_a_while_hears_again(nats_server: NatsServer, unique: str) -> None:
    """Who waited for the broker meanwhile gave up: the answers to their pings come all the same, and meet nobody."""
    async with (
        Link("silent", nats_server.port) as link,
        Bus.connect(BrokerSettings(url=link.url, request_timeout_s=0.2), "listener") as bus,
    ):
        subscription = await bus.subscribe(f"{unique}.before", lambda _: None)
        link.silence()
        await subscription.drain(0.2)
        with pytest.raises(BrokerUnavailable):
            await bus.flush()
        link.heal()
        heard: asyncio.Queue[RawMessage] = asyncio.Queue()
        await bus.subscribe(unique, heard.put_nowait)
        await bus.publish(unique, b"x")
        async with asyncio.timeout(5):
            assert (await heard.get()).data == b"x"


@pytest.mark.parametrize("how", ["drain", "flush"])
async def test_a_cancel_that_comes_together_with_the_answer_is_not_lost(bus: Bus, unique: str, how: str) -> None:
    subscription = await bus.subscribe(unique, lambda _: None)
    waiting = asyncio.create_task(subscription.drain(5.0) if how == "drain" else bus.flush())
    pongs = bus._client._pongs
    while not pongs:
        await asyncio.sleep(0)
    pongs[0].add_done_callback(lambda _: waiting.cancel())
    await asyncio.wait([waiting])
    assert waiting.cancelled()


async def test_the_answer_to_a_ping_speaks_of_all_that_was_sent_before() -> None:
    """A server that writes down what it reads: an order to leave a subject must not be overtaken by the ping that asks whether it was read."""
    heard: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id":"s","version":"2.15.0","max_payload":1048576,"headers":true,"jetstream":true}\r\n')
        while line := await reader.readline():
            heard.append(line.split()[0])
            if heard[-1] == b"PING":
                writer.write(b"PONG\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = HearingClient()
    await client.connect(f"nats://127.0.0.1:{port}")
    try:
        subscription = await client.subscribe("a.subject")
        await client.flush()
        heard.clear()
        await subscription.drain()
        assert heard == [b"UNSUB", b"PING"]
    finally:
        await client.close()
        server.close()
