"""`/dashboard` as an ASGI application: the page, its files, and the JSON it asks for once a second.

Promises: nothing is followed and nothing asked while nobody looks; the page loads nothing from elsewhere, and no browser lets it; only
reading is possible here.
"""

import asyncio
import contextlib
import json
import logging
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ...pipeline.settings import BrokerSettings
from ...schemas.errors import BrokerUnavailable, JetwakeError, NotPermitted, UnknownRequest
from .observer import Observer
from .story import of_event, read_story, routing_of
from .view import WINDOWS_S, snapshot

log = logging.getLogger(__name__)

UNLOOKED_S = 60.0
"""So long after the last question of a page the pipeline is no longer followed."""
FIRST_WAIT_S = 8.0
TRY_AGAIN_S = 2.0
FRESH_S = 0.5
PATH = "/dashboard"
HOST = "127.0.0.1"
NAMES = (HOST, "localhost", "[::1]")
STATIC = Path(__file__).parent / "static"
KINDS = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
FILES = (
    "page.html",
    "page.css",
    "page.js",
    "charts.js",
    "draw.js",
    "request.js",
    "words.js",
    "icon.svg",
    "uplot/uPlot.esm.js",
    "uplot/uPlot.min.css",
)
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none';"
        " frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class Dashboard:
    """`app` serves requests below `/dashboard`; `run` beside it follows the pipeline while somebody looks."""

    def __init__(self, broker: BrokerSettings, if_forbidden: str = "") -> None:
        """`if_forbidden`: what to do when the broker's permissions forbid looking, in words."""
        self._broker = broker
        self._if_forbidden = if_forbidden
        self._looked = asyncio.Event()
        self._looked_s = 0.0
        self._settled = asyncio.Event()
        self._observer: Observer | None = None
        self._trouble = ""
        self._made: dict[tuple[int, str], tuple[float, bytes]] = {}
        self.app = Starlette(
            routes=[
                Route("/", lambda _: RedirectResponse(PATH + "/")),
                Route(PATH, lambda _: RedirectResponse(PATH + "/")),
                Route(PATH + "/", self._page),
                Route(PATH + "/now", self._now),
                Route(PATH + "/requests/{id}", self._story),
                Route(PATH + "/static/{name:path}", self._file),
            ]
        )

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._looked.wait()
            if time.monotonic() - self._looked_s > UNLOOKED_S:
                self._looked.clear()
                continue
            try:
                await self._follow()
            except JetwakeError as error:
                hint = f"; {self._if_forbidden}" if self._if_forbidden and isinstance(error, NotPermitted) else ""
                self._trouble = f"{error}{hint}"
                log.info("the pipeline cannot be followed: %s", self._trouble)
            except BaseExceptionGroup as group:
                ours, others = group.split(JetwakeError)
                if others is not None:
                    raise
                self._trouble = str(ours.exceptions[0]) if ours else ""
                log.info("the pipeline cannot be followed any more: %s", self._trouble)
            if self._trouble:
                self._settled.set()  # whoever waits for a first look hears of it
                await asyncio.sleep(TRY_AGAIN_S)
                self._settled.clear()

    async def _follow(self) -> None:
        async with Observer.open(self._broker) as observer:
            self._trouble = ""
            self._observer = observer
            self._settled.set()
            try:
                async with asyncio.TaskGroup() as tasks:
                    following = tasks.create_task(observer.run())
                    while time.monotonic() - self._looked_s < UNLOOKED_S:
                        await asyncio.sleep(1)
                    following.cancel()
            finally:
                self._observer = None
                self._settled.clear()
                self._looked.clear()
                self._made.clear()

    async def _look(self) -> Observer:
        """Raises BrokerUnavailable when the pipeline cannot be followed."""
        self._looked_s = time.monotonic()
        self._looked.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_WAIT_S if not self._trouble else 0):
                await self._settled.wait()
        if self._observer is None:
            raise BrokerUnavailable(self._trouble or "the broker has not answered yet")
        return self._observer

    # -- what is asked for ----------------------------------------------------------------------------------------------

    async def _page(self, request: Request) -> Response:
        return _static("page.html")

    async def _file(self, request: Request) -> Response:
        name = request.path_params["name"]
        return _static(name) if name in FILES else _json({"error": "there is no such file"}, 404)

    async def _now(self, request: Request) -> Response:
        window, model = request.query_params.get("window", ""), request.query_params.get("model", "")
        window_s = int(window) if window in {str(each) for each in WINDOWS_S} else WINDOWS_S[1]
        try:
            observer = await self._look()
        except BrokerUnavailable as error:
            return _json({"error": str(error)}, 503)
        made_s, body = self._made.get((window_s, model), (0.0, b""))
        if time.monotonic() - made_s > FRESH_S:
            body = json.dumps(asdict(snapshot(observer.known(), observer.history, window_s, model))).encode()
            if len(self._made) > 8:
                self._made.clear()
            self._made[window_s, model] = time.monotonic(), body
        return Response(body, media_type="application/json", headers=HEADERS)

    async def _story(self, request: Request) -> Response:
        request_id = request.path_params["id"]
        try:
            observer = await self._look()
            event = observer.history.find(request_id)
            if event is not None:
                story = of_event(event, await routing_of(observer.bus, request_id))
            else:
                story = await read_story(observer.bus, request_id)
        except UnknownRequest as error:
            return _json({"error": str(error)}, 404)
        except JetwakeError as error:
            return _json({"error": str(error)}, 503)
        return _json(story.as_json())


def for_loopback(app: ASGIApp) -> ASGIApp:
    """Answers only where the `Host` names loopback: a site of others may have made its name resolve to this machine."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        host = next((value.decode("latin-1") for name, value in scope.get("headers", ()) if name == b"host"), "")
        if scope["type"] == "http" and host.lower().rpartition(":")[0] not in NAMES:
            body = b"this page is served to this machine alone, under 127.0.0.1 or localhost"
            await send({"type": "http.response.start", "status": 421, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": body})
            return
        await app(scope, receive, send)

    return guarded


def _static(name: str) -> Response:
    content = (STATIC / name).read_bytes()
    return Response(content, media_type=KINDS[name.rpartition(".")[2]], headers=HEADERS)


def _json(fields: dict[str, Any], status: int = 200) -> Response:
    return Response(json.dumps(fields), status, media_type="application/json", headers=HEADERS)
