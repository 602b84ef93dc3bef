"""Interest in a subject, and the two ways to give it up."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from nats.aio.subscription import Subscription as NatsSubscription

from .faults import FOREIGN_ERRORS
from .hearing_client import keeping_cancels

logger = logging.getLogger(__name__)


class Subscription:
    """Interest in a subject. Leaving it twice, or after the connection closed, does nothing."""

    def __init__(self, subscription: NatsSubscription, on_leave: Callable[[], None]) -> None:
        self._subscription = subscription
        self._on_leave = on_leave
        self._left = False

    async def unsubscribe(self) -> None:
        """Stop now; what the broker sent already and was not yet handed over is dropped."""
        await self._leave(self._subscription.unsubscribe)

    async def drain(self, timeout_s: float) -> None:
        """Tell the broker to stop, and hand over what it sent until it knew."""
        await self._leave(self._subscription.drain, timeout_s)

    async def _leave(self, how: Callable[[], Awaitable[None]], timeout_s: float | None = None) -> None:
        if self._left:
            return
        self._left = True
        self._on_leave()
        with keeping_cancels():
            try:
                async with asyncio.timeout(timeout_s):
                    await how()
            except FOREIGN_ERRORS as error:  # closed or cut off: then the broker has forgotten us already
                logger.debug("leaving %s: %s", self._subscription.subject, error)
