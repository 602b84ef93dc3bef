"""The page in a real browser, on a live system: what it shows is what the system has, whatever words come from outside."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from browser import browser, watched
from fleet import Fleet, fleet_of
from playwright.async_api import expect

from jetwake.deploy.dashboard.serve import serve_dashboard
from jetwake.deploy.dashboard.words import of_time
from jetwake.deploy.nats_server import NatsServer
from jetwake.pipeline.settings import BrokerSettings
from jetwake.producers.client import Client

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
REQUESTS = 12
WAIT_MS = 20_000


class Live:
    def __init__(self, fleet: Fleet, client: Client, url: str) -> None:
        self.fleet, self.client, self.url = fleet, client, url
        self.origin = url.removesuffix("/dashboard/")

    async def ask(self, length: int = 64, **options: Any) -> str:
        fields: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, "session": HOSTILE, **options}
        return (await self.client.generate(list(range(1, length)), **fields)).request_id

    async def now(self) -> dict[str, Any]:
        async with httpx.AsyncClient() as http:
            return (await http.get(f"{self.url}now?window=300")).json()


@pytest.fixture(scope="module")
async def live(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Live]:
    stopping, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    async with (
        NatsServer(tmp_path_factory.mktemp("nats"), sync_always=False) as server,
        fleet_of(server.url, prefill=2, decode=1, policy="kv_aware", slots=2) as (fleet, client),
    ):
        serving = asyncio.create_task(serve_dashboard(BrokerSettings(url=server.url), 0, stopping, ready.set_result))
        yield Live(fleet, client, await ready)
        stopping.set()
        await serving


async def test_the_page_shows_the_system_and_opens_a_request(live: Live) -> None:
    ids = [await live.ask() for _ in range(REQUESTS)]
    async with browser() as started, watched(started, live.origin, viewport={"width": 1280, "height": 900}) as seen:
        page = seen.page
        await page.goto(live.url)
        await page.wait_for_selector(f"#rows tr:nth-child({REQUESTS})", timeout=WAIT_MS)
        workers = await page.locator("#pipeline h4").all_inner_texts()
        assert workers == ["prefill-1", "prefill-2", "decode-1"]
        assert await page.locator(".router .name").all_inner_texts() == ["router-1\nkv_aware"]
        assert await page.locator("#findings").inner_text() != ""
        for seconds in (0.0625, 0.0005, 0.00025, 0.1875, 0.9995, 1.125, 2.675, 12.25, 99.5, 100.5, 3600.5):  # halves too
            script = "async (seconds) => (await import('./static/words.js')).time(seconds)"
            assert await page.evaluate(script, seconds) == of_time(seconds)
        now = await live.now()
        assert f"p99 {of_time(now['totals']['ttft']['p99_s'])}" in await page.locator("#ttft").inner_text()
        assert f"{of_time(now['totals']['itl']['p50_s'])}" in await page.locator("#itl .big").inner_text()

        await page.click(f"#rows a[title='{ids[3]}']")
        await page.wait_for_selector("#request .waterfall", timeout=WAIT_MS)
        stages = await page.locator("#request .stage").all_inner_texts()
        assert [text.split("\n")[0] for text in stages][-4:] == ["handoff wait", "KV transfer", "first decode step", "generation"]
        assert "policy kv_aware" in await page.locator("#request").inner_text()
        assert HOSTILE in await page.locator("#request .facts").inner_text()
        assert await page.locator("#request .facts img").count() == 0
        assert await page.title() == "Jetwake"

        await page.keyboard.press("Escape")
        await page.goto(f"{live.url}#request={ids[0]}")  # an address to give to others
        await page.wait_for_selector("#request .waterfall", timeout=WAIT_MS)
        assert ids[0] in await page.locator("#request-title").inner_text()

        # Closed, and the next address given before the browser says that it closed: that one opens.
        await page.evaluate("id => { document.getElementById('request').close(); location.hash = `request=${id}`; }", ids[1])
        await page.wait_for_selector("#request .waterfall", timeout=WAIT_MS)
        await expect(page.locator("#request-title")).to_contain_text(ids[1])
        await page.keyboard.press("Escape")
        await page.wait_for_selector("#request", state="hidden", timeout=WAIT_MS)
        await expect(page).to_have_url(re.compile(r"[^#]*#?$"))  # not by a script that is tried again: the page forbids eval
        assert seen.faults == []


async def test_a_queue_that_grows_is_seen_growing(live: Live) -> None:
    async with browser() as started, watched(started, live.origin, color_scheme="dark", viewport={"width": 390, "height": 844}) as seen:
        page = seen.page
        await page.goto(live.url)
        depth = page.locator("#pipeline .intake .queue .big")
        await expect(depth).to_have_text("0 wait", timeout=WAIT_MS)
        for name in ("prefill-1", "prefill-2"):
            await live.fleet.stop(name)
        waiting = [asyncio.create_task(live.ask(length=40 + number)) for number in range(7)]
        await expect(depth).to_have_text("7 wait", timeout=WAIT_MS)
        await expect(page.locator("#findings")).to_contain_text("no prefill worker", timeout=WAIT_MS)
        for name in ("prefill-1", "prefill-2"):
            live.fleet.start_worker("prefill", name, slots=2)
        await asyncio.gather(*waiting)
        await expect(depth).to_have_text("0 wait", timeout=WAIT_MS)
        await page.wait_for_selector("#rows tr:nth-child(7)", timeout=WAIT_MS)
        widths = await page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
        assert widths[0] == widths[1] == 390, "no horizontal scroll on a phone"
        assert seen.faults == []


async def test_the_server_gives_nothing_but_the_page(live: Live) -> None:
    async with httpx.AsyncClient(base_url=live.origin) as http:
        page = await http.get("/dashboard/")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert "unsafe" not in page.headers["content-security-policy"]
        for path in (
            "static/../server.py",
            "static/%2e%2e/server.py",
            "static/nothing",
            "requests/*",
            "requests/%3E",
            "requests/unknown-1",
        ):
            assert (await http.get(f"/dashboard/{path}")).status_code == 404, path
        assert (await http.get("/dashboard/", headers={"host": "evil.example:80"})).status_code == 421
        assert (await http.post("/dashboard/now")).status_code == 405
        story = (await http.get(f"/dashboard/requests/{await live.ask()}")).json()
        assert "token_ids" not in json.dumps(story)
        assert (await http.get("/dashboard/now?window=1e9&model=%00")).status_code == 200
