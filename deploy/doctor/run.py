"""Which checks belong to a role, run side by side: those that start something go on while the broker is asked."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...pipeline.settings import BrokerSettings, TopologySettings
from ...schemas.errors import SetupError
from . import machine
from .broker import broker_findings, file_bytes
from .finding import Finding
from .model_files import model_files
from .transfer import nixl_transfer

WORKERS = ("prefill", "decode", "aggregated")
ROLES = ("router", *WORKERS, "gateway", "client", "up")


@dataclass(frozen=True)
class Examined:
    """`role` empty: everything. `broker` None: none is named, and none runs here."""

    role: str
    broker: BrokerSettings | None
    topology: TopologySettings
    model: str | None = None
    store: Path | None = None


def checks_of(examined: Examined) -> list[Callable[[], Finding]]:
    """Of this machine, in the order in which they are told. Pure."""
    role = examined.role
    checks: list[Callable[[], Finding]] = [machine.python, machine.requirements, machine.lock, machine.open_files]
    if role in ("", "up"):
        checks += [machine.nats_server, lambda: machine.disk(examined.store, file_bytes(examined.topology))]
    if role in ("", "up", *WORKERS):
        checks += [machine.shared_memory, machine.gpus, nixl_transfer]
    if examined.model is not None:
        model = examined.model
        checks.append(lambda: model_files(model))
    return checks


async def examine(examined: Examined) -> Sequence[Finding]:
    if examined.role and examined.role not in ROLES:
        raise SetupError(f"no role is called {examined.role!r}; there are {', '.join(ROLES)}")
    here = asyncio.gather(*(asyncio.to_thread(check) for check in checks_of(examined)))
    there = [Finding("broker", "skipped", "none is named, and no `jetwake up` runs here: give --nats-url")]
    if examined.broker is not None:
        there = await broker_findings(examined.broker, examined.topology, examined.role)
    return [*await here, *there]
