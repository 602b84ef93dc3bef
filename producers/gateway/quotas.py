"""How much a tenant may have in a minute: requests, and tokens. Pure: the time comes in.

A bucket holds a minute's worth and fills evenly. Tokens are taken by estimate when a request is admitted (its prompt, and all the
output it may make), and what was not used is given back at its end. Each gateway counts by itself: `share` is its part of the limits.
"""

import math
from dataclasses import dataclass

from ...schemas.errors import InvalidRequest, QuotaExceeded

MINUTE_S = 60.0


class Bucket:
    """`limit` each minute; a limit of 0 is none."""

    def __init__(self, limit: float, now_s: float) -> None:
        self.limit = limit
        self._level = limit
        self._at_s = now_s

    def left(self, now_s: float) -> float:
        if now_s > self._at_s:
            self._level = min(self.limit, self._level + (now_s - self._at_s) * self.limit / MINUTE_S)
            self._at_s = now_s
        return self._level

    def wait_s(self, amount: float, now_s: float) -> float:
        """How long until so much is there."""
        missing = amount - self.left(now_s)
        return max(0.0, missing * MINUTE_S / self.limit) if self.limit else 0.0

    def take(self, amount: float, now_s: float) -> None:
        """May leave less than nothing: then the next ones wait longer. A negative amount is given back."""
        if self.limit:
            self._level = min(self.limit, self.left(now_s) - amount)


@dataclass(frozen=True)
class Limits:
    requests_per_minute: float
    tokens_per_minute: float


class Quota:
    """Of one tenant: all its keys that have the same limits share it."""

    def __init__(self, tenant: str, limits: Limits, now_s: float) -> None:
        self._tenant = tenant
        self.requests = Bucket(limits.requests_per_minute, now_s)
        self.tokens = Bucket(limits.tokens_per_minute, now_s)

    def admit(self, now_s: float) -> None:
        """Counts one request. Raises QuotaExceeded."""
        self._test(self.requests, 1, "requests", now_s)
        self._test(self.tokens, min(1, self.tokens.limit), "tokens", now_s)  # none left: no need to read the request
        self.requests.take(1, now_s)

    def take_tokens(self, amount: int, now_s: float) -> None:
        """Raises QuotaExceeded, and InvalidRequest for what would never be admitted."""
        if self.tokens.limit and amount > self.tokens.limit:
            raise InvalidRequest(
                f"prompt and max_tokens together are {amount} tokens, and {self._tenant} may have {self.tokens.limit:.0f} in a minute "
                "(from one gateway): lower max_tokens"
            )
        self._test(self.tokens, amount, "tokens", now_s)
        self.tokens.take(amount, now_s)

    def correct_tokens(self, taken: int, used: int, now_s: float) -> None:
        self.tokens.take(used - taken, now_s)

    def _test(self, bucket: Bucket, amount: float, what: str, now_s: float) -> None:
        wait_s = bucket.wait_s(amount, now_s)
        if wait_s > 0:
            raise QuotaExceeded(
                f"rate limit of {self._tenant}: {bucket.limit:.0f} {what} in a minute, {max(0.0, bucket.left(now_s)):.0f} left and "
                f"{amount:.0f} wanted: try again in {math.ceil(wait_s)} s",
                wait_s,
            )

    def headers(self, now_s: float) -> list[tuple[bytes, bytes]]:
        """As OpenAI names them. Nothing about what has no limit."""
        found: list[tuple[bytes, bytes]] = []
        for name, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket.limit:
                facts = {
                    "limit": f"{bucket.limit:.0f}",
                    "remaining": f"{max(0, math.floor(bucket.left(now_s)))}",
                    "reset": _duration(bucket.wait_s(bucket.limit, now_s)),
                }
                found += [(f"x-ratelimit-{fact}-{name}".encode(), value.encode()) for fact, value in facts.items()]
        return found


def _duration(seconds: float) -> str:
    """As in OpenAI's headers: `6m0s`, `1.5s`, `20ms`."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
