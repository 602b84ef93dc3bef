"""Runs the public and the admin port on one event loop, and stops them without cutting answers off. Imports vLLM."""

import asyncio
import contextlib
import json
import logging
import socket
from argparse import Namespace
from collections.abc import Callable, Generator, Sequence
from typing import Any

import uvicorn

from ...schemas.errors import SetupError
from . import application
from .admin import Admin
from .at_once import render_at_once
from .engine import BusEngine
from .exposure import refuse_open
from .front import App, Front, Headers
from .gate import Gate
from .kept_streams import KeptStreams
from .metrics import GatewayMetrics
from .resuming import Resuming
from .settings import GatewaySettings
from .submission import Submitter

logger = logging.getLogger(__name__)

BACKLOG = 2048


class _Server(uvicorn.Server):
    """Signals belong to whoever runs the gateway."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


class GatewayServer:
    """`open` binds and builds; `run` serves until `stop`."""

    def __init__(
        self,
        settings: GatewaySettings,
        submitter: Submitter,
        gate: Gate | None = None,
        more_routes: Sequence[Any] = (),
        kept: KeptStreams | None = None,
        dashboard: App | None = None,
        metrics_text: Callable[[], bytes] = bytes,
    ) -> None:
        """`more_routes`: served beside those of vLLM's application. `kept`: with it, streams can be resumed. On the admin port: `dashboard`,
        and `metrics_text` for Prometheus.
        """
        self._dashboard = dashboard
        self._settings = settings
        self._more_routes = more_routes
        self._gate = gate or Gate()
        self._submitter = submitter
        self._kept = kept
        self._metrics = GatewayMetrics()
        self._metrics_text = metrics_text
        self._servers: list[tuple[_Server, socket.socket]] = []
        self._engine: BusEngine | None = None
        self.app: Front | None = None
        self.names: tuple[str, ...] = ()
        self.own_headers: Headers = []
        self.url = ""
        self.admin_url = ""

    async def open(self) -> None:
        """Raises SetupError: a port that is taken, a flag or a model that is wrong."""
        settings = self._settings
        public = bind(settings.host, settings.port)
        admin = bind(settings.admin_host, settings.admin_port)
        self.url = f"{url_of(public)}/v1"
        self.admin_url = url_of(admin)
        source = application.source_of(self._submitter.model, settings)
        args = application.parse_flags(self._submitter.model, source, settings)
        self.names = (*args.served_model_name, *(module.name for module in args.lora_modules or ()))
        self.own_headers = [(b"authorization", f"Bearer {args.api_key[0]}".encode())] if args.api_key else []
        refuse_open(settings.host, guarded=self._gate.closed or bool(args.api_key), allow_open=settings.allow_open)
        config = application.vllm_config(args)
        self._engine = BusEngine(config, self._submitter, self._metrics, settings.request_timeout_s, self._kept)
        if args.fast_tokenizer and not args.trust_request_chat_template:
            render_at_once(self._engine.renderer)
        keep_alive_s = float(args.sse_keep_alive_interval) or settings.keep_alive_s
        args.sse_keep_alive_interval = 0  # the front does it, without a task for each token
        app = await application.build(self._engine, args)
        app.router.routes.extend(self._more_routes)
        paths = application.SERVED_ROUTES | {route.path for route in self._more_routes if "{" not in route.path}
        patient = settings.model_copy(update={"keep_alive_s": keep_alive_s})
        self.app = front = Front(app, patient, self._metrics, paths, self._gate, self._resuming(app))
        side = Admin(self._submitter, self._metrics_text, self._dashboard)
        self._servers = [
            (_Server(self._config(front, args)), public),
            (_Server(uvicorn.Config(side, lifespan="off", log_level="warning", access_log=False)), admin),
        ]

    def _resuming(self, app: Any) -> Resuming | None:
        if self._kept is None:
            return None
        by_token = application.paths_by_token(app)
        self._kept.rendering = application.rendering(self._submitter.model, self._settings, by_token)
        resuming = Resuming(self._kept)
        resuming.by_token = by_token
        return resuming

    def _config(self, front: Front, args: Namespace) -> uvicorn.Config:
        options: dict[str, Any] = {
            name: getattr(args, name)
            for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers")
            if getattr(args, name, None)
        }
        return uvicorn.Config(
            front,
            log_level=args.uvicorn_log_level,
            access_log=not args.disable_uvicorn_access_log and args.uvicorn_log_level in ("info", "debug", "trace"),
            timeout_graceful_shutdown=int(self._settings.grace_s),
            **options,
        )

    async def run(self) -> None:
        """Returns when `stop` was called and the answers in hand are done, or cut off after `grace_s`."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for server, listening in self._servers:
                    tasks.create_task(server.serve(sockets=[listening]))
                if self._settings.ready_file is not None:
                    tasks.create_task(self._say_ready())
        finally:
            if self._engine is not None:
                self._engine.shutdown()

    async def _say_ready(self) -> None:
        while not all(server.started for server, _ in self._servers):
            await asyncio.sleep(0.02)
        assert self._settings.ready_file is not None
        self._settings.ready_file.write_text(json.dumps({"url": self.url, "admin_url": self.admin_url}))

    def stop(self) -> None:
        for server, _ in self._servers:
            server.should_exit = True


def bind(host: str, port: int) -> socket.socket:
    """A listening address. Raises SetupError when it is taken or not of this machine."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(BACKLOG)  # from now on connections wait, instead of being refused until the server runs
    except OSError as error:
        raise SetupError(f"cannot listen on {host}:{port}: {error.strerror or error}; give another port (0: any free one)") from error
    return listening


def url_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if listening.family == socket.AF_INET6 else f"http://{host}:{port}"
