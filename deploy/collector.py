"""The garbage collector of a process that serves.

What a process has made until it is ready (hundreds of thousands of objects, where vLLM is imported) lives as long as it does: looking
through it again and again finds nothing, and stops everything for as long as it takes. And a request makes hundreds of objects, so young
ones are looked at after many requests and not within each.
"""

import gc

YOUNG_OBJECTS = 20_000


def settle() -> None:
    """To be called once, by a process that is ready."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 20, 20)
