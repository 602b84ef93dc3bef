"""`jetwake dead`: what could not be processed, for a person or a script."""

import json
import time
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from ..pipeline.connection import Bus
from ..pipeline.dead_letters import Kept, again_from, dead_letter, dead_letters, send_again, throw_away
from ..pipeline.publish import Publisher
from ..pipeline.settings import BrokerSettings
from ..producers.client import Answer, Client
from ..schemas.errors import JetwakeError, RequestFailed


async def list_dead(broker: BrokerSettings) -> list[Kept]:
    async with Bus.connect(broker, name="dead") as bus:
        return await dead_letters(bus)


async def show_dead(broker: BrokerSettings, number: int) -> Kept:
    async with Bus.connect(broker, name="dead") as bus:
        return await dead_letter(bus, number)


async def retry_dead(broker: BrokerSettings, numbers: Sequence[int], wait: bool) -> list[dict[str, Any]]:
    """One fact sheet for each letter, in order. Letters that hold no request stay, and `error` says so."""
    async with Client.connect(broker) as client, Bus.connect(broker, name="dead") as bus:
        return [await _retry(client, bus, number, wait) for number in numbers]


async def _retry(client: Client, bus: Bus, number: int, wait: bool) -> dict[str, Any]:
    facts: dict[str, Any] = {"letter": number}
    try:
        kept = await dead_letter(bus, number)
        if not wait:
            request = await send_again(bus, Publisher(bus), kept, client.now_ns())
            return facts | {"request_id": request.request_id, "gateway": request.gateway}
        answer = await _answer(client, bus, kept)
        return facts | {"request_id": answer.request_id, "text": answer.text, "finish_reason": answer.finish_reason}
    except JetwakeError as error:
        code = error.reply_code if isinstance(error, RequestFailed) else error.code
        return facts | {"error": code, "why": str(error)}


async def _answer(client: Client, bus: Bus, kept: Kept) -> Answer:
    submitted = await client.submit_request(again_from(kept, client.now_ns(), client.name))
    await throw_away(bus, kept.number)
    return await submitted.answer()


def facts_of(kept: Kept, whole: bool = False) -> dict[str, Any]:
    letter, request = kept.letter, kept.request
    facts: dict[str, Any] = {
        "letter": kept.number,
        "stage": letter.stage,
        "code": letter.code,
        "text": letter.text,
        "request_id": letter.request_id or (request.request_id if request else ""),
        "attempts": letter.attempts or letter.deliveries,
        "workers": list(request.failed_workers) if request and request.failed_workers else [letter.worker] if letter.worker else [],
        "dead_ns": letter.dead_ns,
        "can_retry": request is not None,
    }
    if whole:
        facts |= {"subject": letter.subject, "payload_bytes": len(letter.payload)}
        facts["request"] = (
            request.model_dump(exclude={"prompt_tokens"}) | {"prompt_length_tokens": request.prompt_length_tokens} if request else None
        )
    return facts


def print_list(letters: Sequence[Kept], as_json: bool) -> None:
    if as_json:
        print(json.dumps([facts_of(kept) for kept in letters]))
        return
    table = Table(box=SIMPLE)
    for heading in ("id", "stage", "code", "request", "attempts", "workers", "age", "why"):
        table.add_column(heading, overflow="fold")
    now_s = time.time()
    for facts in map(facts_of, letters):
        age = age_in_words(now_s - facts["dead_ns"] / 1e9)
        workers, attempts = ", ".join(facts["workers"]), str(facts["attempts"])
        table.add_row(str(facts["letter"]), facts["stage"], facts["code"], facts["request_id"], attempts, workers, age, facts["text"])
    Console().print(table if letters else "no dead letters")


def print_one(kept: Kept, as_json: bool) -> None:
    facts = facts_of(kept, whole=True)
    if as_json:
        print(json.dumps(facts))
        return
    for name, value in facts.items():
        print(f"{name:14} {json.dumps(value) if isinstance(value, dict | list) else value}")
    if kept.request is None:
        print(f"{'payload':14} {kept.letter.payload[:200]!r}")


def print_retried(outcomes: Sequence[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(outcomes))
        return
    for facts in outcomes:
        if "error" in facts:
            print(f"{facts['letter']}: {facts['error']}: {facts['why']}")
        elif "text" in facts:
            print(f"{facts['letter']}: {facts['request_id']} answered ({facts['finish_reason']}):\n{facts['text']}")
        else:
            print(f"{facts['letter']}: sent again as {facts['request_id']}; the replies go to {facts['gateway']}")


def age_in_words(seconds: float) -> str:
    for unit, size_s in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size_s:
            return f"{seconds / size_s:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
