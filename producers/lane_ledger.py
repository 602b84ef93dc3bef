"""What is on its way to each worker and not yet taken by it: the part of a queue that its owner cannot tell.

Pure. Entries are made before a job is published (decisions made meanwhile must count it) and dropped when the worker's load report
says that it has fetched that far: the queue's own sequence numbers keep this exact, whichever reports or decisions go missing.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(eq=False)
class Booking:
    """One job on its way. `sequence` is that of the queue, 0 until it is stored there."""

    request_id: str
    lane: str
    work_s: float
    sequence: int = 0


@dataclass
class _Queue:
    """`work_s` is the sum over `bookings`, added up anew whenever some leave, so that it never drifts. `booked_s`: when the last came."""

    bookings: deque[Booking] = field(default_factory=deque[Booking])
    work_s: float = 0.0
    booked_s: float = -math.inf

    def add(self, booking: Booking, now_s: float) -> None:
        self.bookings.append(booking)
        self.work_s += booking.work_s
        self.booked_s = now_s

    def keep(self, bookings: Iterable[Booking]) -> None:
        self.bookings = deque(bookings)
        self.work_s = sum(booking.work_s for booking in self.bookings)


NOTHING_QUEUED = _Queue()


class LaneLedger:
    """`changed`: lanes of which something changed. Who keeps what follows from the ledger reads it and empties it."""

    def __init__(self) -> None:
        self._queued: dict[str, _Queue] = {}
        self._fetched: dict[str, int] = {}
        self.changed: set[str] = set()

    def book(self, request_id: str, lane: str, work_s: float, now_s: float = 0.0) -> Booking:
        """`now_s`: on the clock that decisions are made by."""
        booking = Booking(request_id, lane, work_s)
        self._queued.setdefault(lane, _Queue()).add(booking, now_s)
        self.changed.add(lane)
        return booking

    def stored(self, booking: Booking, sequence: int) -> None:
        booking.sequence = sequence
        self._drop_fetched(booking.lane)

    def withdraw(self, booking: Booking) -> None:
        """It was not published after all, or was taken back."""
        queue = self._queued.get(booking.lane)
        if queue is not None and booking in queue.bookings:
            queue.keep(other for other in queue.bookings if other is not booking)
            self.changed.add(booking.lane)

    def fetched(self, lane: str, sequence: int) -> None:
        """The worker has taken everything up to `sequence` of the queue."""
        if sequence > self._fetched.get(lane, 0):
            self._fetched[lane] = sequence
            self._drop_fetched(lane)

    def queued(self, lane: str) -> list[Booking]:
        """In the order in which they will be taken."""
        return list(self._queued.get(lane, NOTHING_QUEUED).bookings)

    def queued_requests(self, lane: str) -> int:
        return len(self._queued.get(lane, NOTHING_QUEUED).bookings)

    def queued_work_s(self, lane: str) -> float:
        return self._queued.get(lane, NOTHING_QUEUED).work_s

    def booked_s(self, lane: str) -> float:
        """When the last job for this lane was booked, taken or not."""
        return self._queued.get(lane, NOTHING_QUEUED).booked_s

    def forget(self, lane: str) -> None:
        self._queued.pop(lane, None)
        self._fetched.pop(lane, None)
        self.changed.add(lane)

    @property
    def lanes(self) -> set[str]:
        return self._queued.keys() | self._fetched.keys()

    def _drop_fetched(self, lane: str) -> None:
        queue, fetched = self._queued.get(lane), self._fetched.get(lane, 0)
        if queue is not None and any(0 < booking.sequence <= fetched for booking in queue.bookings):
            queue.keep(booking for booking in queue.bookings if not 0 < booking.sequence <= fetched)
            self.changed.add(lane)
