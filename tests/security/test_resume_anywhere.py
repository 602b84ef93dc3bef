"""Gateways whose users were made to resume each other's streams: what they may read of each other, and still of nobody else."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from jetwake.deploy.nats_declare import declare_all
from jetwake.deploy.nats_server import NatsServer
from jetwake.deploy.nats_users import ACCOUNTS_FILE, User, users_of, write_users
from jetwake.deploy.nats_users import broker_settings as settings_of
from jetwake.pipeline.clock import WallClock
from jetwake.pipeline.connection import Bus
from jetwake.pipeline.publish import Publisher
from jetwake.pipeline.replies import ReplyInbox
from jetwake.pipeline.settings import BrokerSettings, TopologySettings
from jetwake.producers.gateway.kept_streams import KeptStreams
from jetwake.producers.gateway.streaming import Streaming
from jetwake.schemas import subjects
from jetwake.schemas.errors import NotPermitted, UnknownRequest
from jetwake.schemas.replies import Checkpoint, TokenChunk
from jetwake.schemas.requests import InferenceRequest
from jetwake.schemas.tokens import pack_tokens

REQUEST = InferenceRequest(request_id="r-1", gateway="gateway-1", model="m", prompt_tokens=pack_tokens([1]), deadline_ns=2**62)
PATH = "/v1/chat/completions"


class Broker:
    """`gateways` by name: their settings, as `permissions` writes them."""

    def __init__(self, folder: Path, *, resume_anywhere: bool) -> None:
        users = users_of(["gateway-1", "gateway-2"], ["alice"], [], resume_anywhere=resume_anywhere)
        write_users(folder, users, [], {})
        self.folder = folder
        self.users = {str(user): user for user in users}
        self.accounts = (folder / ACCOUNTS_FILE).read_text()

    def settings(self, user: str, url: str) -> BrokerSettings:
        return settings_of(self.folder, self.users[user], url)


@pytest.fixture
async def opened(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[tuple[Broker, str]]:
    broker = Broker(tmp_path / "users", resume_anywhere=request.param)
    async with NatsServer(tmp_path / "nats", sync_always=False, extra_config=broker.accounts) as server:
        async with Bus.connect(broker.settings("admin", server.url), "admin") as admin:
            await declare_all(admin, TopologySettings(), [])
        yield broker, server.url


def kept_of(bus: Bus) -> tuple[KeptStreams, ReplyInbox]:
    inbox = ReplyInbox(bus, bus.settings.name, WallClock())
    kept = KeptStreams(bus, Publisher(bus), inbox, grace_s=0.2)
    kept.rendering = "same"
    return kept, inbox


@pytest.mark.parametrize("opened", [True], indirect=True)
async def test_a_gateway_goes_on_with_the_stream_of_another(opened: tuple[Broker, str]) -> None:
    broker, url = opened
    async with (
        Bus.connect(broker.settings("gateway gateway-1", url), "one") as one,
        Bus.connect(broker.settings("gateway gateway-2", url), "two") as two,
        Bus.connect(broker.settings("decode", url), "decode") as worker,
    ):
        await kept_of(one)[0].keep(REQUEST, Streaming(PATH, b"{}", by_token=False))
        kept, inbox = kept_of(two)
        await inbox.start()
        checkpoint = Checkpoint(request_id="r-1", model="m", attempt=1, tokens=pack_tokens([7]))
        await Publisher(worker).send(subjects.answer("gateway-1", "r-1", 1), checkpoint)
        await worker.flush()
        replies = await kept.read_again(await kept.find("r-1"))
        await Publisher(worker).send(
            subjects.reply("gateway-1", "r-1"), TokenChunk(request_id="r-1", attempt=1, offset=1, tokens=pack_tokens([8]))
        )
        heard = b""
        async for reply in replies:
            assert isinstance(reply, TokenChunk)
            heard += reply.tokens
            if heard == pack_tokens([7, 8]):
                break
        replies.close()
        await inbox.close()
        with pytest.raises(NotPermitted):
            await inbox.resume("alice", "r-2", "m")


@pytest.mark.parametrize("opened", [False], indirect=True)
async def test_a_gateway_of_its_own_does_not(opened: tuple[Broker, str]) -> None:
    broker, url = opened
    async with (
        Bus.connect(broker.settings("gateway gateway-1", url), "one") as one,
        Bus.connect(broker.settings("gateway gateway-2", url), "two") as two,
    ):
        await kept_of(one)[0].keep(REQUEST, Streaming(PATH, b"{}", by_token=False))
        await one.flush()
        kept, inbox = kept_of(two)
        with pytest.raises(UnknownRequest):
            await kept.find("r-1")
        with pytest.raises(NotPermitted):
            await inbox.resume("gateway-1", "r-1", "m")


def test_peers_are_the_other_gateways() -> None:
    assert users_of(["a", "b", "c"], ["d"], [], resume_anywhere=True)[-4:] == [
        User("gateway", "a", ("b", "c")),
        User("gateway", "b", ("a", "c")),
        User("gateway", "c", ("a", "b")),
        User("client", "d"),
    ]
