"""Who may ask: finds the tenant behind a request, and what of its quota is left. The same for HTTP and NATS.

Without any key it is open. Once there was one, it stays closed to whoever has none, until the gateway is started anew: a
bucket that was lost or emptied does not open it.
"""

import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from ...schemas.errors import QuotaExceeded
from ...schemas.keys import ApiKey
from .failures import Failure, failure_of
from .keyring import KeyRing, cache_salt
from .quotas import Limits, Quota

Headers = Iterable[tuple[bytes, bytes]]
_MAX_QUOTAS = 10_000


class Admitted(Protocol):
    """What of an exchange is decided here."""

    cache_salt: str
    tenant: str
    priority_class: Any
    grant: "Grant | None"


class Grant:
    """What one request takes of its tenant's quota."""

    def __init__(self, quota: Quota, clock: Callable[[], float]) -> None:
        self._quota = quota
        self._clock = clock

    def take_tokens(self, amount: int) -> None:
        """By estimate. Raises QuotaExceeded, InvalidRequest."""
        self._quota.take_tokens(amount, self._clock())

    def correct_tokens(self, taken: int, used: int) -> None:
        self._quota.correct_tokens(taken, used, self._clock())

    def headers(self) -> list[tuple[bytes, bytes]]:
        return self._quota.headers(self._clock())


class Gate:
    """`share`: this gateway's part of every limit, where several serve the same tenants."""

    def __init__(self, secret: bytes = b"", share: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._secret = secret
        self._share = share
        self._clock = clock
        self._ring = KeyRing(())
        self._quotas: dict[tuple[str, Limits], Quota] = {}
        self.closed = False

    def use(self, keys: Iterable[ApiKey]) -> None:
        """From now on these are the keys, and no others. Quotas go on."""
        self._ring = KeyRing(keys)
        if len(self._ring):
            if not self._secret:
                raise ValueError("keys without a secret: cache salts could be guessed")
            self.closed = True

    def admit(self, exchange: Admitted, headers: Headers) -> Failure | None:
        """Says in the exchange on whose behalf it is; or why it is not served."""
        if not self.closed:
            return None
        presented = presented_key(headers)
        key = self._ring.find(presented) if presented else None
        if key is None:
            how = "send Authorization: Bearer KEY" if not presented else "the API key is not known here"
            return Failure(401, "invalid_api_key", f"no access: {how}")
        exchange.tenant = key.tenant
        exchange.cache_salt = cache_salt(self._secret, key.tenant)
        if key.priority_class is not None:
            exchange.priority_class = key.priority_class
        exchange.grant = Grant(quota := self._quota(key), self._clock)
        try:
            quota.admit(self._clock())
        except QuotaExceeded as error:
            return failure_of(error, 0.0)
        return None

    def _part(self, limit: int) -> float:
        return max(1.0, limit * self._share) if limit else 0.0

    def _quota(self, key: ApiKey) -> Quota:
        limits = Limits(self._part(key.requests_per_minute), self._part(key.tokens_per_minute))
        found = self._quotas.get((key.tenant, limits))
        if found is None:
            if len(self._quotas) >= _MAX_QUOTAS:
                del self._quotas[next(iter(self._quotas))]
            found = self._quotas[key.tenant, limits] = Quota(key.tenant, limits, self._clock())
        return found


def presented_key(headers: Headers) -> str:
    """Of `Authorization: Bearer KEY`, or `x-api-key: KEY` as Anthropic's clients send it; empty when there is none."""
    given = dict(headers)
    scheme, _, key = given.get(b"authorization", b"").decode("latin-1").strip().partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return given.get(b"x-api-key", b"").decode("latin-1").strip()
