"""`jetwake top`: the live page in a terminal, from the same snapshot."""

import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ...pipeline.settings import BrokerSettings
from .observer import Observer
from .picture import PoolView, Snapshot, WorkerView
from .view import snapshot
from .words import counted, of_time, percent, size

EVERY_S = 1.0
BAR = 10
ROWS = 8
LEVELS = {"bad": "bold red", "warn": "yellow", "good": "green", "info": "dim"}
REQUEST_COLUMNS: dict[str, Literal["left", "right"]] = {
    "request": "left", "ended": "left", "prompt": "right", "cached": "right", "output": "right", "first": "right", "total": "right", "prefill": "left",
    "decode": "left", "tries": "right",
}  # fmt: skip
TICKS = "▁▂▃▄▅▆▇█"


async def show_top(broker: BrokerSettings, stopping: asyncio.Event, once: bool, as_json: bool) -> None:
    """Until `stopping`, or once. Raises BusError."""
    async with Observer.open(broker, "top") as observer:
        if once:
            now = snapshot(observer.known(), observer.history)
            print(json.dumps(asdict(now))) if as_json else Console(highlight=False).print(frame(now))
            return
        with Live(screen=True, auto_refresh=False) as live:
            async with asyncio.TaskGroup() as tasks:
                following = tasks.create_task(observer.run())
                while not stopping.is_set():
                    live.update(frame(snapshot(observer.known(), observer.history)), refresh=True)
                    with suppress(TimeoutError):
                        async with asyncio.timeout(EVERY_S):
                            await stopping.wait()
                following.cancel()


def frame(now: Snapshot) -> RenderableType:
    """Pure."""
    all_ = now.totals
    head = Text.assemble(
        ("Jetwake ", "bold"),
        (f"last {now.window_s // 60} min   ", "dim"),
        f"{all_.requests_per_s:.1f} requests/s   {all_.output_tokens_per_s:,.0f} tokens/s   ",
        f"TTFT p50 {of_time(all_.ttft.p50_s)} p99 {of_time(all_.ttft.p99_s)}   ITL p50 {of_time(all_.itl.p50_s)} p99 {of_time(all_.itl.p99_s)}   ",
        f"cache {percent(all_.reuse_real)} ({percent(all_.reuse_predicted)} expected)   KV {size(all_.moved_bytes_per_s)}/s",
    )
    said = [Text(f"● {finding.text} {finding.advice}".rstrip(), style=LEVELS[finding.level]) for finding in now.findings]
    waiting = "   ".join(f"{queue.priority_class} {queue.waiting} waiting, {queue.held} in routers" for queue in now.queues)
    routers = ", ".join(f"{router['name']} ({router['policy']})" for router in now.routers) or "no router"
    parts: list[RenderableType] = [head, *said, Text(f"\nrequests: {waiting}   {routers}")]
    if now.durable_jobs or now.dead_letters:
        parts.append(Text(f"{counted(now.durable_jobs, 'durable job')}, {counted(now.dead_letters, 'dead letter')}"))
    parts += [_pool(pool) for pool in now.pools]
    trend = Text.assemble(
        ("TTFT p50 ", "dim"), sparks(now.lines.ttft_p50_s), ("   waiting ", "dim"), sparks(now.lines.waiting_prefill),
        ("   tokens/s ", "dim"), sparks(now.lines.output_tokens_per_s),
    )  # fmt: skip
    return Group(*parts, trend, _requests(now))


def _pool(pool: PoolView) -> Table:
    table = Table(box=SIMPLE_HEAD, title=escape(f"{pool.model}  {pool.pool}"), title_justify="left", title_style="bold", pad_edge=False)
    for heading, justify in (
        ("worker", "left"),
        ("state", "left"),
        ("queued", "right"),
        ("running", "left"),
        ("KV cache", "left"),
        ("held", "right"),
    ):
        table.add_column(heading, justify="right" if justify == "right" else "left")
    for leg, workers in (("prefill", pool.prefill), ("decode", pool.decode), ("aggregated", pool.aggregated)):
        if leg == "decode" and workers:
            style = "bold red" if "decode" in pool.short else "dim"
            table.add_row(Text(f"handoffs: {pool.handoffs_waiting} waiting", style=style))
        for worker in workers:
            short = "prefill" if leg == "aggregated" else leg
            table.add_row(*_worker(worker, short in pool.short))
    return table


def _worker(worker: WorkerView, hurts: bool) -> Sequence[RenderableType]:
    used = (worker.used_blocks + worker.held_blocks) / worker.blocks if worker.blocks else 0.0
    running = worker.running / worker.slots if worker.slots else 0.0
    return (
        escape(worker.worker),
        Text(worker.state, style="" if worker.state == "ready" else "bold red" if worker.state == "stalled" else "yellow"),
        Text(str(worker.waiting) if worker.role != "decode" else "", style="bold red" if hurts and worker.waiting else ""),
        Text(f"{bar(running)} {worker.running}/{worker.slots}" if worker.told else "?"),
        Text(f"{bar(used)} {percent(used)}" if worker.told else "?"),
        Text(str(worker.held_handoffs) if worker.role == "prefill" else ""),
    )


def _requests(now: Snapshot) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading, justify in REQUEST_COLUMNS.items():
        table.add_column(heading, no_wrap=True, justify=justify, min_width=7 if heading in ("first", "total") else None)
    for row in now.requests[:ROWS]:
        cached = percent(row.cached_tokens / row.prompt_tokens) if row.prompt_tokens else "–"
        told = row.id, row.code if row.outcome == "failed" else row.outcome, f"{row.prompt_tokens:,}", cached, f"{row.completion_tokens:,}"
        where = of_time(row.ttft_s), of_time(row.total_s), row.prefill_worker, row.decode_worker, str(row.attempt)
        table.add_row(*(escape(cell) for cell in (*told, *where)))
    return table


def bar(share: float) -> str:
    """Pure."""
    full = min(BAR, round(share * BAR))
    return "█" * full + "░" * (BAR - full)


def sparks(values: Sequence[float | int | None], most: int = 24) -> str:
    """The last of them, each as high as it is of the highest. Pure."""
    shown = values[-most:]
    highest = max((value for value in shown if value is not None), default=0)
    return "".join(" " if value is None else TICKS[round(value / highest * 7)] if highest else TICKS[0] for value in shown)
