"""What is on its way to each worker and not yet taken by it: the part of a queue that its owner cannot tell.

Pure. Entries are made before a job is published (decisions made meanwhile must count it) and dropped when the worker's load report
says that it has fetched that far: the queue's own sequence numbers keep this exact, whichever reports or decisions go missing.
"""

from collections import deque
from dataclasses import dataclass


@dataclass(eq=False)
class Booking:
    """One job on its way. `sequence` is that of the queue, 0 until it is stored there."""

    request_id: str
    lane: str
    work_s: float
    sequence: int = 0


class LaneLedger:
    def __init__(self) -> None:
        self._queued: dict[str, deque[Booking]] = {}
        self._fetched: dict[str, int] = {}

    def book(self, request_id: str, lane: str, work_s: float) -> Booking:
        booking = Booking(request_id, lane, work_s)
        self._queued.setdefault(lane, deque()).append(booking)
        return booking

    def stored(self, booking: Booking, sequence: int) -> None:
        booking.sequence = sequence
        self._drop_fetched(booking.lane)

    def withdraw(self, booking: Booking) -> None:
        """It was not published after all, or was taken back."""
        queue = self._queued.get(booking.lane)
        if queue is not None and booking in queue:
            queue.remove(booking)

    def fetched(self, lane: str, sequence: int) -> None:
        """The worker has taken everything up to `sequence` of the queue."""
        if sequence > self._fetched.get(lane, 0):
            self._fetched[lane] = sequence
            self._drop_fetched(lane)

    def queued(self, lane: str) -> list[Booking]:
        """In the order in which they will be taken."""
        return list(self._queued.get(lane, ()))

    def queued_requests(self, lane: str) -> int:
        return len(self._queued.get(lane, ()))

    def queued_work_s(self, lane: str) -> float:
        return sum(booking.work_s for booking in self._queued.get(lane, ()))

    def forget(self, lane: str) -> None:
        self._queued.pop(lane, None)
        self._fetched.pop(lane, None)

    @property
    def lanes(self) -> set[str]:
        return self._queued.keys() | self._fetched.keys()

    def _drop_fetched(self, lane: str) -> None:
        queue, fetched = self._queued.get(lane), self._fetched.get(lane, 0)
        if queue is None:
            return
        if any(0 < booking.sequence <= fetched for booking in queue):
            self._queued[lane] = deque(booking for booking in queue if not 0 < booking.sequence <= fetched)
