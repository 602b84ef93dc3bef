"""Parts of a system as processes of their own, each with nothing but the environment that `jetwake nats permissions` wrote for its user."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from jetwake.deploy.nats_users import User
from jetwake.pipeline.permissions import Role

LEAVES_WITHIN_S = 30.0


@dataclass
class Processes:
    """`url`: of the broker. `logs` is made."""

    users: Path
    url: str
    logs: Path
    running: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)

    def environment(self, role: Role, name: str = "") -> dict[str, str]:
        lines = User(role, name).file(self.users, "env").read_text().splitlines()
        own = dict(line.split("=", 1) for line in lines)
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("JETWAKE_")}
        return {**inherited, **own, "JETWAKE_NATS_URL": self.url}

    async def start(self, user: tuple[Role, str], label: str, *arguments: str) -> None:
        self.logs.mkdir(exist_ok=True)
        with (self.logs / f"{label}.log").open("ab") as log:
            self.running[label] = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "jetwake.deploy.cli", *arguments, stdout=log, stderr=log, env=self.environment(*user)
            )

    async def run(self, user: tuple[Role, str], *arguments: str) -> str:
        """One command to its end; what it printed."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "jetwake.deploy.cli", *arguments, stdout=-1, stderr=-1, env=self.environment(*user)
        )
        output, errors = await process.communicate()
        assert process.returncode == 0, (arguments, output.decode(), errors.decode())
        return output.decode()

    async def start_worker(self, role: Role, number: int, model: str, *options: str) -> None:
        own = [word for option in options for word in ("--engine-option", option)]
        label = f"{role}-{number}"
        await self.start((role, ""), label, role, "--name", label, "--engine", "simulated", "--model", model, *own)

    async def start_gateway(self, name: str, model: str, *options: str) -> tuple[str, str]:
        """Its URL and that of its admin port, when it serves. The user's name is the gateway's own."""
        ready = self.logs / f"{name}.ready"
        ready.unlink(missing_ok=True)
        await self.start(("gateway", name), name, "gateway", "--port", "0", "--model", model, "--ready-file", str(ready), *options)
        while not ready.exists() or not ready.read_text():
            assert self.running[name].returncode is None, self.log(name)
            await asyncio.sleep(0.05)
        told = json.loads(ready.read_text())
        return told["url"], told["admin_url"]

    def log(self, label: str) -> str:
        return (self.logs / f"{label}.log").read_text()

    async def kill(self, label: str) -> None:
        process = self.running.pop(label)
        process.kill()
        await process.wait()

    async def ended(self, label: str) -> int:
        """The exit code of one that was told to end."""
        async with asyncio.timeout(LEAVES_WITHIN_S):
            return await self.running.pop(label).wait()

    def check(self) -> None:
        for label, process in self.running.items():
            assert process.returncode is None, (label, process.returncode, self.log(label))

    async def stop_all(self) -> None:
        for process in self.running.values():
            if process.returncode is None:
                process.terminate()
        for label in list(self.running):
            try:
                await self.ended(label)
            except TimeoutError:
                for process in self.running.values():
                    process.kill()
                raise


@asynccontextmanager
async def processes_of(users: Path, url: str, logs: Path) -> AsyncGenerator[Processes]:
    made = Processes(users, url, logs)
    try:
        yield made
    finally:
        await made.stop_all()
