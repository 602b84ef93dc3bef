"""What a trace is: requests with their times, lengths, and what of their prompts is alike. No text and no tokens are needed.

A prompt is a list of *content ids*, one for each stretch of `stretch_tokens` tokens (the last may be shorter). Two prompts share their
first k stretches when their first k ids are equal. `prompt_hashes` turns that into the chained block hashes that the prefix index and
the block pool work with. Pure.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from struct import pack

import xxhash

from ...schemas.errors import SetupError


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """`at_s` counts from the start of the trace. `content`: see the module; `session` is empty where the trace knows none."""

    at_s: float
    input_tokens: int
    output_tokens: int
    content: tuple[int, ...]
    session: str = ""


@dataclass(frozen=True)
class Trace:
    """`requests` are in the order of their times. `notes`: what was assumed in making it, for people."""

    name: str
    stretch_tokens: int
    requests: tuple[TraceRequest, ...]
    notes: tuple[str, ...] = ()


def prompt_hashes(trace: Trace, block_size_tokens: int) -> Iterator["array[int]"]:
    """For each request in turn: the chained hashes of its full blocks. Equal leading stretches give equal leading hashes.

    Raises SetupError unless a stretch is a whole number of blocks.
    """
    if trace.stretch_tokens % block_size_tokens:
        raise SetupError(f"--block-size must divide {trace.stretch_tokens}, the grain of {trace.name}; {block_size_tokens} does not")
    blocks_per_stretch = trace.stretch_tokens // block_size_tokens
    chains: dict[tuple[int, int], array[int]] = {}
    for request in trace.requests:
        hashes, parent = array("Q"), 0
        for content in request.content:
            chain = chains.get((parent, content))
            if chain is None:
                chain = chains[parent, content] = array("Q")
                for place in range(blocks_per_stretch):
                    parent = xxhash.xxh3_64_intdigest(pack("<qq", content, place), parent)
                    chain.append(parent)
            parent = chain[-1]
            hashes.extend(chain)
        yield hashes[: request.input_tokens // block_size_tokens]
