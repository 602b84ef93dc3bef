"""Files and batches of a gateway process: what its clients ask for, and the running of batches beside its other work."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from ..consumers.scratch import ScratchFolder
from ..pipeline.clock import ServerClock
from ..pipeline.connection import Bus
from ..pipeline.publish import Publisher
from ..producers.batches.desk import BatchDesk
from ..producers.batches.runner import BatchRunner
from ..producers.batches.settings import BatchSettings
from ..producers.gateway.front import Front, Headers
from .role_settings import built


def batch_settings(options: Sequence[str], configured: Mapping[str, Any] | None = None) -> BatchSettings:
    """From a command line: `key=value` pairs of BatchSettings over what is configured. Raises SetupError naming what is wrong."""
    return built(BatchSettings, "batch option", configured or {}, "--batch-option", options)


class GatewayBatches:
    """`routes` before the gateway's application is built, `start` when it is, then `run` beside it until `stop`."""

    def __init__(self, settings: BatchSettings, bus: Bus, publisher: Publisher, clock: ServerClock, name: str, model: str) -> None:
        self._settings = settings
        self._bus = bus
        self._publisher = publisher
        self._clock = clock
        self._name = name
        self._model = model
        self._desk = BatchDesk(bus, publisher, clock, model, settings)
        self._runner: BatchRunner | None = None

    def routes(self, retry_after_s: float) -> list[Any]:
        from ..producers.gateway.batch_api import routes

        return list(routes(self._desk, retry_after_s))

    def start(self, app: Front, names: Sequence[str], headers: Headers) -> None:
        """`names`: of the models served here. `headers`: what a call of the application from inside must carry."""
        from ..producers.gateway.batch_lines import asking_for, body_check
        from ..producers.gateway.body_models import refused_body

        self._runner = BatchRunner(
            self._bus,
            self._publisher,
            self._clock,
            name=self._name,
            model=self._model,
            knows=frozenset(names).__contains__,
            check_body=body_check(refused_body),
            ask_for=asking_for(app, self._bus, self._publisher, self._clock, self._model, headers),
            scratch=scratch_folder,
            settings=self._settings,
            others=lambda: app.open_of_others,
        )

    async def run(self) -> None:
        if self._runner is not None:
            await self._runner.run()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.stop()


@asynccontextmanager
async def scratch_folder() -> AsyncGenerator[Path]:
    folder = ScratchFolder("jetwake-batch-")
    try:
        yield folder.path
    finally:
        folder.remove()
