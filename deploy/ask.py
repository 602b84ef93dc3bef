"""One question from the command line: the answer as it streams, then one line or one JSON object about how it was made."""

import dataclasses
import json
from typing import Any

from ..pipeline.settings import BrokerSettings
from ..producers.client import Answer, Client


async def ask_once(
    broker: BrokerSettings | str, prompt: str, model: str | None, options: dict[str, Any], *, raw: bool = False, show: bool = False
) -> Answer:
    """`show`: print the pieces as they come. Raises what `Client.submit` and `Submitted.answer` raise."""
    async with Client.connect(broker) as client:
        question = prompt if raw else [{"role": "user", "content": prompt}]
        submitted = await client.submit(question, model=model, **options)
        async for piece in submitted:
            if show:
                print(piece.text, end="", flush=True)
        if show:
            print()
        return await submitted.answer()


def print_answer(answer: Answer) -> None:
    """The one line: which workers, blocks cached, bytes pulled, times."""
    way = f"prefill {answer.prefill_worker}"
    if answer.decode_worker and answer.decode_worker != answer.prefill_worker:
        way += f" -> decode {answer.decode_worker}"
    print(
        f"[{way} | {answer.prompt_tokens} prompt tokens, {answer.cached_tokens} cached | {answer.kv_bytes:,} bytes of KV pulled"
        f" | TTFT {answer.ttft_ms:.0f} ms, {len(answer.token_ids)} tokens in {answer.total_ms:.0f} ms | {answer.finish_reason}]"
    )


def print_json(answer: Answer) -> None:
    fields = dataclasses.asdict(answer)
    del fields["logprobs"]
    print(json.dumps(fields))
