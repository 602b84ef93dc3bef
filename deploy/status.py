"""`jetwake status`: who is alive, how busy, and what waits where, read from the bus at one moment; and what is wrong with it.

A queue is said to stand still after a second look, one second after the first: only where messages wait at all.
"""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from ..consumers.peers import without_peers
from ..pipeline.connection import Bus, RawMessage
from ..pipeline.registry import Registry
from ..pipeline.settings import BrokerSettings
from ..pipeline.topology import QueueCount, consumer_counts, stream_counts
from ..producers.silent_workers import silent_workers
from ..producers.standing_queues import standing_queues
from ..schemas import subjects
from ..schemas.codec import decode
from ..schemas.errors import Undecodable
from ..schemas.routing import RouterHere
from ..schemas.workers import WorkerLoad

LOAD_WAIT_S = 1.5
"""Workers tell their load at least once a second."""
ROUTERS_WAIT_S = 0.3
"""How many routers there are, nobody knows: so long they have to answer, at least."""
SECOND_LOOK_S = 1.0


async def read_status(broker: BrokerSettings) -> dict[str, Any]:
    loads: dict[str, WorkerLoad] = {}
    heard = asyncio.Event()

    def on_load(message: RawMessage) -> None:
        try:
            load = decode(message.data, WorkerLoad)
        except Undecodable:
            return  # somebody else's version: the worker is listed without its load
        loads[f"{load.worker}-{load.incarnation}"] = load
        heard.set()

    async with Bus.connect(broker, name="status") as bus:
        await bus.subscribe(subjects.LOADS, on_load)
        before = await consumer_counts(bus)
        routers = await _call_routers(bus)
        called_s = asyncio.get_running_loop().time()
        registry = Registry(bus)
        await registry.start()
        cards = sorted(registry.workers.values(), key=lambda card: card.worker)
        await _hear_all({card.lane for card in cards}, loads, heard)
        queues = await consumer_counts(bus)
        standing = dict[str, str]()
        if any(count.pending and _same(before.get(subject), count) for subject, count in queues.items()):
            await asyncio.sleep(SECOND_LOOK_S)
            before, queues = queues, await consumer_counts(bus)
            standing = standing_queues(before, queues, registry.workers, loads)
        await asyncio.sleep(called_s + ROUTERS_WAIT_S - asyncio.get_running_loop().time())
        return {
            "routers": [routers[name].model_dump(exclude={"type"}) for name in sorted(routers)],
            "without_peers": without_peers(registry.workers),
            "standing_queues": standing,
            "workers": [
                {
                    **card.model_dump(include={"worker", "incarnation", "role", "state", "model", "pool", "peers", "domain"}),
                    "capacity": {"blocks": card.capacity_blocks, "slots": card.capacity_slots},
                    "load": loads[card.lane].model_dump(exclude={"type", "worker", "incarnation"}) if card.lane in loads else None,
                }
                for card in cards
            ],
            "index": {"silent_workers": silent_workers(loads[card.lane] for card in cards if card.lane in loads)},
            "queues": {subject: {"pending": count.pending, "in_progress": count.in_progress} for subject, count in queues.items()},
            "streams": {name: asdict(count) for name, count in (await stream_counts(bus)).items()},
        }


def _same(before: QueueCount | None, now: QueueCount) -> bool:
    return before is not None and before.delivered == now.delivered


async def _call_routers(bus: Bus) -> Mapping[str, RouterHere]:
    """By name. Fills up as they answer."""
    found: dict[str, RouterHere] = {}

    def on_answer(message: RawMessage) -> None:
        try:
            here = decode(message.data, RouterHere)
        except Undecodable:
            return  # somebody else's version, or the broker's word that nobody listens
        found[here.router] = here

    inbox = bus.new_inbox()
    await bus.subscribe(inbox, on_answer)
    await bus.publish_with_reply(subjects.ROUTERS, b"", inbox)
    return found


async def _hear_all(lanes: set[str], loads: dict[str, WorkerLoad], heard: asyncio.Event) -> None:
    """Until every worker told its load, or long enough: a worker that says nothing is shown without one."""
    try:
        async with asyncio.timeout(LOAD_WAIT_S):
            while not lanes <= loads.keys():
                heard.clear()
                await heard.wait()
    except TimeoutError:
        return


def waits_for(worker: dict[str, Any]) -> str:
    """What a worker that drains has still in hand. Pure."""
    if worker["state"] != "draining" or not worker["load"]:
        return ""
    load = worker["load"]
    return f"{load['running_requests']} running, {load['held_handoffs']} to be pulled"


def print_status(status: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(status))
        return
    console = Console()
    workers = Table(title="workers", title_justify="left", box=SIMPLE)
    for heading in ("worker", "role", "state", "model", "running", "blocks", "held", "peers", "waits for"):
        workers.add_column(heading)
    for worker in status["workers"]:
        load = worker["load"] or {}
        workers.add_row(
            worker["worker"],
            worker["role"],
            worker["state"],
            worker["model"],
            f"{load.get('running_requests', '?')}/{worker['capacity']['slots']}",
            f"{load.get('used_blocks', '?')}/{worker['capacity']['blocks']}",
            str(load.get("held_blocks", "?")),
            str(len(worker["peers"])),
            waits_for(worker),
        )
    console.print(workers)
    routers = Table(title="routers", title_justify="left", box=SIMPLE)
    for heading in ("router", "policy", "in hand", "kept", "blocks known"):
        routers.add_column(heading)
    for router in status["routers"]:
        routers.add_row(router["router"], router["policy"], str(router["in_hand"]), str(router["kept"]), str(router["index_blocks"]))
    console.print(routers)
    queues = Table(title="queues", title_justify="left", box=SIMPLE)
    for heading in ("subject", "pending", "in progress"):
        queues.add_column(heading)
    for subject, count in status["queues"].items():
        queues.add_row(subject, str(count["pending"]), str(count["in_progress"]))
    console.print(queues)
    if not status["routers"]:
        console.print("no router is there: requests wait in their queue")
    for worker, why in status["without_peers"].items():
        console.print(f"{worker} gets no work, for want of a peer to exchange KV with: {why}")
    for subject, what in status["standing_queues"].items():
        console.print(f"the queue {subject} stands still: {what}")
    for worker, silent_s in status["index"]["silent_workers"].items():
        console.print(f"index: no events from {worker} for {silent_s:.0f} s")
