"""A real Chromium: the machine's own, driven by Playwright. No browser is downloaded."""

import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from playwright.async_api import Browser, Page, async_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@dataclass
class Watched:
    """A page, and what it did that a good page does not do."""

    page: Page
    faults: list[str] = field(default_factory=list[str])


@asynccontextmanager
async def browser() -> AsyncGenerator[Browser]:
    """Skips where there is none."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no Chromium on this machine: `apt-get install chromium` brings one")
    async with async_playwright() as playwright:
        started = await playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-dev-shm-usage"])
        try:
            yield started
        finally:
            await started.close()


@asynccontextmanager
async def watched(started: Browser, origin: str, **context: Any) -> AsyncGenerator[Watched]:
    """A page of its own. Console errors, uncaught exceptions, and requests to elsewhere than `origin` are faults."""
    own = await started.new_context(**context)
    seen = Watched(await own.new_page())
    seen.page.on("console", lambda said: seen.faults.append(f"console: {said.text}") if said.type in ("error", "warning") else None)
    seen.page.on("pageerror", lambda error: seen.faults.append(f"exception: {error}"))
    seen.page.on("request", lambda asked: None if asked.url.startswith(origin) else seen.faults.append(f"asked {asked.url}"))
    try:
        yield seen
    finally:
        await own.close()
