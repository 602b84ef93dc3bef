"""An answer that was asked for before, from the command line: what is kept of it, and what is still to come."""

import json

from ..pipeline.settings import BrokerSettings
from ..producers.client import Client
from ..producers.reading import Answer


async def attach_to(broker: BrokerSettings | str, request_id: str, after: int, *, show: bool = False) -> Answer:
    """`show`: print the text of the tokens from offset `after` on, as it comes. Raises UnknownRequest, and how the request ended otherwise."""
    async with Client.connect(broker) as client:
        reading = await client.resume(request_id, after)
        async for piece in reading:
            if show:
                print(piece.text, end="", flush=True)
        if show:
            print()
        return await reading.answer()


def print_attached(answer: Answer) -> None:
    """One line: the whole answer's length, how it ended, and how many attempts it took."""
    attempts = "one attempt" if answer.attempts == 1 else f"{answer.attempts} attempts"
    print(f"[{answer.request_id} | {len(answer.token_ids)} tokens in all | {answer.finish_reason} | {attempts}]")


def print_json(answer: Answer, after: int) -> None:
    fields = {
        "request_id": answer.request_id,
        "after": after,
        "token_ids": answer.token_ids[after:],
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "attempts": answer.attempts,
    }
    print(json.dumps(fields))
