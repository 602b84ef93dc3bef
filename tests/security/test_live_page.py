"""The live page of a gateway behind a broker that knows users: it looks as the observer, or says what is missing."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import httpx

from jetwake.deploy.dashboard.server import Dashboard
from jetwake.deploy.gateway import NO_RIGHTS, looking_broker
from jetwake.deploy.nats_users import User
from jetwake.producers.gateway.settings import GatewaySettings

from .conftest import Secured


@asynccontextmanager
async def page_of(secured: Secured, settings: GatewaySettings) -> AsyncGenerator[httpx.AsyncClient]:
    dashboard = Dashboard(looking_broker(secured.settings("gateway", settings.name), settings), NO_RIGHTS)
    following = asyncio.create_task(dashboard.run())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(dashboard.app), base_url="http://127.0.0.1") as http:
        yield http
    following.cancel()


async def test_a_gateway_looks_with_the_seed_of_the_observer(secured: Secured) -> None:
    seed = User("observer").file(secured.folder, "nk")
    async with page_of(secured, GatewaySettings(name="gateway-1", dashboard_nkey_file=seed)) as page:
        now = await page.get("/dashboard/now")
        assert now.status_code == 200, now.text


async def test_a_gateway_without_it_says_what_to_do(secured: Secured) -> None:
    async with page_of(secured, GatewaySettings(name="gateway-1")) as page:
        now = await page.get("/dashboard/now")
        assert (now.status_code, "--dashboard-nkey-file" in now.json()["error"]) == (503, True), now.text
