"""Notices an engine that fills its cache and says nothing: prefills are compared with the KV events that were told.

A publisher that was not switched on, or not wired, makes no error: routing by cache quietly becomes balancing by load. Pure: times
come in.
"""


class UntoldBlocks:
    """A prefill is answered by any events told after it began; who computes more than one block must put a new one into the cache
    (one block alone may be the last of a prompt that is cached whole, computed once more).
    """

    def __init__(self, block_size_tokens: int) -> None:
        self._block_size_tokens = block_size_tokens
        self._told_s = float("-inf")
        self._since_s: float | None = None

    def prefilled(self, computed_tokens: int, started_s: float, now_s: float) -> None:
        if computed_tokens > self._block_size_tokens and self._told_s < started_s and self._since_s is None:
            self._since_s = now_s

    def told(self, now_s: float) -> None:
        self._told_s, self._since_s = now_s, None

    def silent_s(self, now_s: float) -> float:
        """Seconds since the end of the first prefill that no events have answered; 0 when there is none."""
        return 0.0 if self._since_s is None else now_s - self._since_s
