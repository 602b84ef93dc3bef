"""`jetwake request`: the story of one request as text."""

import json

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ...pipeline.connection import Bus
from ...pipeline.settings import BrokerSettings
from .story import Bar, Story, read_story
from .words import of_time, percent, size

WIDTH = 32
COLOURS = {"first": "magenta", "gap": "yellow", "answer": "cyan"}


async def story_of(broker: BrokerSettings, request_id: str) -> Story:
    """Raises UnknownRequest, and BusError."""
    async with Bus.connect(broker, "request") as bus:
        return await read_story(bus, request_id)


def print_story(story: Story, as_json: bool) -> None:
    if as_json:
        print(json.dumps(story.as_json()))
        return
    console = Console(highlight=False)
    console.print(f"[bold]{escape(story.id)}[/] {escape(headline(story))}")
    for line in facts(story):
        console.print(escape(line))
    if story.bars:
        console.print(waterfall(story.bars))
    elif story.outcome == "running":
        console.print("it runs: its times are told when it ends")
    routing = story.routing
    if routing is None:
        console.print("no router remembers why it went there: that was too long ago, or the router was restarted")
        return
    console.print(escape(f"{routing.router}, policy {routing.policy}: {routing.reason}"))
    if routing.considered:
        table = Table(box=SIMPLE)
        for heading in ("", "lane", "score", "what was known"):
            table.add_column(heading)
        for lane in routing.considered:
            table.add_row("*" if lane.lane == routing.lane else "", escape(lane.lane), f"{lane.score:.4f}", escape(lane.words))
        console.print(table)


def headline(story: Story) -> str:
    """How it ended, and after how long. Pure."""
    ended = f"{story.outcome} ({story.reason})" if story.reason else story.outcome
    first = f", first token after {of_time(story.ttft_s)}" if story.ttft_s is not None else ""
    whole = f", {of_time(story.total_s)} in all" if story.total_s is not None else ""
    attempts = f", attempt {story.attempt}" if story.attempt > 1 else ""
    return f"{story.model}: {ended}{first}{whole}{attempts}"


def facts(story: Story) -> list[str]:
    """Pure."""
    lines: list[str] = [story.error] if story.error else []
    if story.prompt_tokens:
        share = percent(story.cached_tokens / story.prompt_tokens)
        lines.append(
            f"{story.prompt_tokens:,} prompt tokens, {story.cached_tokens:,} ({share}) from cache,"
            f" {story.predicted_cached_tokens:,} expected; {story.completion_tokens:,} output tokens"
        )
    if story.prefill_worker or story.decode_worker:
        where = f"prefill on {story.prefill_worker or '–'}, decode on {story.decode_worker or '–'}"
        moved = f", {size(story.kv_bytes)} of KV cache moved" if story.kv_bytes else ""
        lines.append(where + moved + (f" in {of_time(story.kv_transfer_s)}" if story.kv_transfer_s else ""))
    return lines


def waterfall(bars: list[Bar]) -> Table:
    """To the scale of all but a long generation, which then runs out of it at the right (`›`)."""
    last = bars[-1]
    long = last.stage == "generation" and last.length_s > 2 * last.start_s > 0
    scale_s = last.start_s * 1.35 if long else last.start_s + last.length_s
    table = Table(box=None, padding=(0, 1), show_header=False)
    table.add_column("stage", no_wrap=True)
    table.add_column("bar", width=WIDTH)
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("meaning", style="dim")
    for bar in bars:
        table.add_row(bar.stage.replace("_", " "), drawn(bar, scale_s, runs_out=long and bar is last), of_time(bar.length_s), bar.meaning)
    return table


def drawn(bar: Bar, scale_s: float, runs_out: bool) -> Text:
    """Pure."""
    if scale_s <= 0:
        return Text()
    start = min(WIDTH - 1, round(bar.start_s / scale_s * WIDTH))
    length = max(1, min(WIDTH - start, round(bar.length_s / scale_s * WIDTH)))
    block = "█" * length if bar.length_s / scale_s * WIDTH >= 0.5 else "▏"
    return Text(" " * start + (block[:-1] + "›" if runs_out else block), style=COLOURS[bar.part])
