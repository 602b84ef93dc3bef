"""The order in which the lines of a batch are sent: those that begin with the same text one after the other, so that caches help. Pure.

A line's *trail* is the chain of digests of its prompt's text, one for each `STEP_CHARACTERS`, each covering all text before it: two
lines have as much of their trails in common as of their text. A trail takes 8 bytes for a step, whatever the prompts add up to.
"""

import json
from array import array
from collections.abc import Sequence
from typing import Any, TypeAlias

from xxhash import xxh3_64_intdigest

ORDER = "shared-prefix-1"
"""Names what `send_order` does: a batch that was begun by a version that orders otherwise is known by it."""
STEP_CHARACTERS = 256
MAX_STEPS = 4096

Trail: TypeAlias = "array[int]"


def prompt_text(body: dict[str, Any]) -> str:
    """What comes before the answer, near enough in the order in which it is rendered. For all endpoints that batches have."""
    parts: list[Any] = [body.get(name) for name in ("tools", "instructions", "messages", "prompt", "input")]
    return "\n".join(part if isinstance(part, str) else json.dumps(part, ensure_ascii=False) for part in parts if part is not None)


def trail_of(text: str) -> Trail:
    """Whole steps only: what is shorter shares nothing worth a cache."""
    trail: Trail = array("Q")
    before = 0
    for start in range(0, min(len(text), MAX_STEPS * STEP_CHARACTERS) - STEP_CHARACTERS + 1, STEP_CHARACTERS):
        step = text[start : start + STEP_CHARACTERS].encode("utf-8", "surrogatepass")
        before = xxh3_64_intdigest(step, seed=before)
        trail.append(before)
    return trail


def send_order(trails: Sequence[Trail]) -> list[int]:
    """The places of the lines in the order to send them: equal beginnings together, groups and lines as they first appear."""
    first_seen: dict[int, int] = {}
    for trail in trails:
        for digest in trail:
            first_seen.setdefault(digest, len(first_seen))
    # The numbers of a trail are as unique as its digests, and a group's number is that of its first line.
    keys = [[first_seen[digest] for digest in trail] for trail in trails]
    return sorted(range(len(trails)), key=lambda place: (keys[place], place))
