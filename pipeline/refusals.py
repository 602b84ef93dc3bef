"""What the broker's permissions forbade on this connection: remembered, so that whoever tries hears of it instead of waiting.

Reads the broker's remarks, handed in by `connection`. Promises: a publish that was refused is refused here at once when it is tried
again, for a while; a subscription that was refused is told by the next `check_subscriptions`, until it is left.
"""

import time
from collections.abc import Callable

from ..schemas.errors import NotPermitted

FORBIDDEN = "the broker's permissions forbid"
"""In every error and line of a log about that."""
REMEMBERED_S = 10.0
"""Then the broker is asked again: its configuration may have been mended."""


class Refusals:
    """Subjects are compared without regard to case: nats-py tells them in lower case."""

    def __init__(self) -> None:
        self._publishes: dict[str, float] = {}
        self._wanted: dict[str, str] = {}
        self._subscriptions: dict[str, None] = {}
        self._listeners: dict[int, tuple[str, Callable[[NotPermitted], None]]] = {}
        self._heard = 0

    def publish_refused(self, subject: str) -> None:
        now_s = time.monotonic()
        self._publishes = {old: since_s for old, since_s in self._publishes.items() if now_s - since_s < REMEMBERED_S}
        self._publishes[subject.lower()] = now_s
        for wanted, listener in list(self._listeners.values()):
            if wanted.lower() == subject.lower():
                listener(not_permitted("publish", wanted))

    def subscription_refused(self, subject: str) -> None:
        self._subscriptions[subject.lower()] = None

    def on_publish_refused(self, subject: str, listener: Callable[[NotPermitted], None]) -> Callable[[], None]:
        """For who publishes there and waits for answers elsewhere. Returns its removal."""
        self._heard += 1
        number = self._heard
        self._listeners[number] = (subject, listener)
        return lambda: self._listeners.pop(number, None) and None

    def subscribing(self, subject: str) -> None:
        self._wanted[subject.lower()] = subject

    def left(self, subject: str) -> None:
        """Nobody subscribes to it any more."""
        self._subscriptions.pop(subject.lower(), None)
        self._wanted.pop(subject.lower(), None)

    def forget(self) -> None:
        """A new connection: the broker says again what it forbids."""
        self._publishes.clear()
        self._subscriptions.clear()

    def check_publish(self, subject: str) -> None:
        """Raises NotPermitted."""
        if self._publishes and time.monotonic() - self._publishes.get(subject.lower(), -REMEMBERED_S) < REMEMBERED_S:
            raise not_permitted("publish", subject)

    def check_subscription(self, subject: str) -> None:
        """Raises NotPermitted."""
        if subject.lower() in self._subscriptions:
            raise not_permitted("subscription", subject)

    def check_subscriptions(self) -> None:
        """Raises NotPermitted while any is refused."""
        for subject in self._subscriptions:
            raise not_permitted("subscription", self._wanted.get(subject, subject))


def not_permitted(verb: str, subject: str) -> NotPermitted:
    return NotPermitted(f"{FORBIDDEN} {verb} to {subject}")
