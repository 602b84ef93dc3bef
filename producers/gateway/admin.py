"""The admin port: metrics, and whether this gateway lives and can serve. Apart from the public port, and on loopback by default."""

import json
from collections.abc import Callable
from typing import Any

from .front import App, Message, Receive, Scope, Send
from .submission import Submitter

_TEXT = b"text/plain; version=0.0.4; charset=utf-8"
_JSON = b"application/json"


class Admin:
    """`/metrics`; `/health`: the process lives; `/ready`: a request would be taken now. `dashboard`: what answers below `/dashboard`."""

    def __init__(self, submitter: Submitter, metrics_text: Callable[[], bytes], dashboard: App | None = None) -> None:
        self._dashboard = dashboard
        self._submitter = submitter
        self._metrics_text = metrics_text

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._dashboard is not None and (scope["path"] + "/").startswith("/dashboard/"):
            await self._dashboard(scope, receive, send)
            return
        status, kind, body = self._page(scope["path"])
        headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
        start: Message = {"type": "http.response.start", "status": status, "headers": headers}
        await send(start)
        await send({"type": "http.response.body", "body": body})

    def _page(self, path: str) -> tuple[int, bytes, bytes]:
        if path == "/metrics":
            return 200, _TEXT, self._metrics_text()
        if path == "/health":
            return 200, _JSON, _json({"status": "ok", "model": self._submitter.model.model})
        if path == "/ready":
            refusal = self._submitter.refusal()
            if refusal is None:
                return 200, _JSON, _json({"status": "ready"})
            return 503, _JSON, _json({"status": "not ready", "reason": str(refusal), "code": refusal.code})
        return 404, _JSON, _json({"error": f"there is no {path} here: /metrics, /health, /ready, /dashboard"})


def _json(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields).encode()
