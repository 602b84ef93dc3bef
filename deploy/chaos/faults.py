"""Doing what the plan says: each fault is done, lasts, and is undone. Whatever is still done at the end is undone then."""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from ...pipeline.jetstream import api
from ...pipeline.topology import delete_consumer, durables
from ...schemas.errors import BusError
from ...schemas.streams import STREAMS, WORKERS_BUCKET
from ..nats_cluster import wait_until_whole
from .freezing import freeze
from .observer import WORK_QUEUES, Observer
from .plan import Fault
from .system import System

log = logging.getLogger(__name__)

WHOLE_AGAIN_S = 60.0


class Faults:
    """`report` hears a line for each fault."""

    def __init__(self, system: System, observer: Observer, report: Callable[[str], None]) -> None:
        self._system = system
        self._observer = observer
        self._report = report
        self._broker_turn = asyncio.Lock()
        self._frozen: set[int] = set()
        self.done: list[str] = []

    async def run(self, faults: Sequence[Fault], stopping: asyncio.Event) -> None:
        """Until the last one is over, or `stopping`. Everything is whole on return."""
        started_s = time.monotonic()
        tasks = set[asyncio.Task[None]]()
        try:
            for fault in faults:
                await _until(stopping, started_s + fault.at_s)
                if stopping.is_set():
                    break
                self._report(str(fault))
                task = asyncio.create_task(self._do(fault, stopping))
                tasks.add(task)
            if tasks:
                await asyncio.gather(*tasks)
        finally:
            self.heal()

    def heal(self) -> None:
        for link in self._system.links.values():
            link.heal()
            link.calm()
        for pid in self._frozen:
            _signal(pid, signal.SIGCONT)
        self._frozen.clear()

    async def _do(self, fault: Fault, stopping: asyncio.Event) -> None:
        kinds: dict[str, Callable[[Fault, asyncio.Event], Coroutine[Any, Any, None]]] = {
            "kill": self._kill,
            "freeze": self._freeze,
            "partition": self._partition,
            "client-cut": self._partition,
            "messages": self._messages,
            "broker-stop": self._broker,
            "broker-kill": self._broker,
            "consumer": self._consumer,
            "stream": self._stream,
        }
        await kinds[fault.kind](fault, stopping)
        self.done.append(fault.kind)

    async def _kill(self, fault: Fault, _: asyncio.Event) -> None:
        if pid := self._system.pid(fault.target):
            _signal(pid, signal.SIGKILL)

    async def _freeze(self, fault: Fault, stopping: asyncio.Event) -> None:
        pid = self._system.pid(fault.target)
        if not pid:
            return
        self._frozen.add(pid)
        with suppress(ProcessLookupError):  # it died on its own
            await freeze(pid)
        await _wait(stopping, fault.duration_s)
        if pid == self._system.pid(fault.target):  # else it was killed, and the number may be another's
            _signal(pid, signal.SIGCONT)
        self._frozen.discard(pid)

    async def _partition(self, fault: Fault, stopping: asyncio.Event) -> None:
        link = self._system.links[fault.target]
        link.cut() if fault.manner == "cut" else link.silence()
        await _wait(stopping, fault.duration_s)
        link.heal()

    async def _messages(self, fault: Fault, stopping: asyncio.Event) -> None:
        link = self._system.links[fault.target]
        link.disturb(fault.manner, fault.dice)
        await _wait(stopping, fault.duration_s)
        link.calm()

    async def _broker(self, fault: Fault, stopping: asyncio.Event) -> None:
        """One server at a time, and of a cluster the next one only when it is whole again: that is what it can bear."""
        async with self._broker_turn:
            servers = self._system.servers
            server = servers[int(fault.dice * len(servers))]
            await (server.stop() if fault.kind == "broker-stop" else server.kill())
            await _wait(stopping, fault.duration_s)
            await server.start()
            if len(servers) > 1 and (missing := await wait_until_whole(self._observer.bus, WHOLE_AGAIN_S)):
                self._report(f"  the cluster is not whole again: {', '.join(missing)}")

    async def _consumer(self, fault: Fault, _: asyncio.Event) -> None:
        try:
            there = [(stream, durable) for stream in WORK_QUEUES for durable in await durables(self._observer.bus, stream)]
            if there:
                stream, durable = there[int(fault.dice * len(there))]
                self._report(f"  deleting consumer {stream}/{durable}")
                await delete_consumer(self._observer.bus, stream, durable)
        except BusError as error:
            self._report(f"  no consumer deleted: {error}")

    async def _stream(self, fault: Fault, _: asyncio.Event) -> None:
        """Those that hold what can be told or asked again: what is accepted, and how it ended, is nobody's to delete."""
        names = [spec.name for spec in STREAMS if spec.storage == "memory"] + [f"KV_{WORKERS_BUCKET.name}"]
        name = names[int(fault.dice * len(names))]
        try:
            self._report(f"  deleting stream {name}")
            await api(self._observer.bus, f"STREAM.DELETE.{name}")
        except BusError as error:
            self._report(f"  not deleted: {error}")


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        log.info("process %d is gone already", pid)


async def _wait(stopping: asyncio.Event, seconds: float) -> None:
    await _until(stopping, time.monotonic() + seconds)


async def _until(stopping: asyncio.Event, moment_s: float) -> None:
    try:
        async with asyncio.timeout(max(0.0, moment_s - time.monotonic())):
            await stopping.wait()
    except TimeoutError:
        return
