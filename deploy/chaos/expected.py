"""The right answer of each prompt, token by token: what makes a duplicate, a gap or somebody else's token visible.

Simulated engines compute a function of the prompt, which is computed here too. A real model's answers are asked for beforehand,
twice, and only prompts whose two answers agree are used: batches of another size may tip a near tie.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from ...consumers.engine import Leg
from ...consumers.simulated_model import Limits, begin
from ...producers.client import Client
from ...schemas.errors import SetupError
from ...schemas.requests import Sampling
from ...schemas.tokens import pack_tokens


def simulated_answer(limits: Limits, prompt: Sequence[int], sampling: Sampling, cache_salt: str = "") -> list[int]:
    answer = begin(Leg("reference", pack_tokens(prompt), sampling, cache_salt=cache_salt), limits)
    tokens = list[int]()
    while answer.finish_reason is None:
        token, _ = answer.draw()
        tokens.append(token)
    return tokens


async def measured_answers(client: Client, prompts: Sequence[Sequence[int]], max_tokens: int) -> dict[tuple[int, ...], list[int]]:
    """Greedy answers of `max_tokens` tokens, for the prompts that have stable ones. Raises SetupError when hardly any has."""
    options: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
    alone = [(await client.generate(prompt, **options)).token_ids for prompt in prompts]
    together = await asyncio.gather(*(client.generate(prompt, **options) for prompt in prompts))
    stable = {tuple(p): first for p, first, second in zip(prompts, alone, together, strict=True) if first == second.token_ids}
    if len(stable) * 2 < len(prompts):
        raise SetupError(f"only {len(stable)} of {len(prompts)} answers of this model are stable: give it --engine-option dtype=float32")
    return stable
