"""How long a job is on its way from the router to a worker, by how long the broker takes to store one and to say so. Pure."""

MOST_S = 0.05
"""A broker that is slow for another reason, or was away, is no reason to fill queues."""
NEWEST_COUNTS = 0.1


class DeliveryTime:
    """`seconds`: 0 until one was measured."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def measured(self, stored_s: float) -> None:
        """To store a job, there and back, took so long. A worker's way is as long: the broker sends it on when it has told us."""
        self.seconds += NEWEST_COUNTS * (min(stored_s, MOST_S) - self.seconds)
