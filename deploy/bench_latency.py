"""`jetwake bench latency`: time to first token and in all of a running system, one request at a time, with prompts that share nothing."""

import json
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.console import Console

from ..pipeline.settings import BrokerSettings
from ..producers.client import Answer, Client
from ..schemas.workers import ModelCard


@dataclass(frozen=True)
class Latency:
    """Milliseconds, of `requests` requests with prompts of `prompt_tokens` random tokens."""

    prompt_tokens: int
    max_tokens: int
    requests: int
    ttft_p50_ms: float
    ttft_max_ms: float
    total_p50_ms: float
    total_max_ms: float
    kv_bytes_p50: int


async def measure_latency(
    broker: BrokerSettings, model: str | None, lengths: Sequence[int], requests: int, max_tokens: int
) -> list[Latency]:
    async with Client.connect(broker) as client:
        client.default_model = model
        card = await client.model(model)
        figures: list[Latency] = []
        for length in lengths:
            print(f"{requests} requests of {length} prompt tokens", file=sys.stderr)
            answers = [await _ask(client, card, length, max_tokens) for _ in range(requests + 1)][1:]  # the first warms up
            figures.append(_figures(length, max_tokens, answers))
        return figures


async def _ask(client: Client, card: ModelCard, length: int, max_tokens: int) -> Answer:
    prompt = [random.randrange(card.vocabulary_size) for _ in range(length)]
    return await client.generate(prompt, model=card.model, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def _figures(length: int, max_tokens: int, answers: Sequence[Answer]) -> Latency:
    first, total = [answer.ttft_ms for answer in answers], [answer.total_ms for answer in answers]
    return Latency(
        prompt_tokens=length,
        max_tokens=max_tokens,
        requests=len(answers),
        ttft_p50_ms=round(statistics.median(first), 1),
        ttft_max_ms=round(max(first), 1),
        total_p50_ms=round(statistics.median(total), 1),
        total_max_ms=round(max(total), 1),
        kv_bytes_p50=int(statistics.median(answer.kv_bytes for answer in answers)),
    )


def print_latency(figures: Sequence[Latency], as_json: bool) -> None:
    if as_json:
        print(json.dumps([asdict(figure) for figure in figures]))
        return
    console = Console()
    for figure in figures:
        console.print(
            f"{figure.prompt_tokens} prompt tokens, {figure.max_tokens} answered, {figure.requests} requests: "
            f"TTFT p50 {figure.ttft_p50_ms:.0f} ms, max {figure.ttft_max_ms:.0f} ms; "
            f"total p50 {figure.total_p50_ms:.0f} ms, max {figure.total_max_ms:.0f} ms; {figure.kv_bytes_p50:,} bytes pulled"
        )
