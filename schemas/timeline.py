"""When a request passed which point, in server time, and how long each stage between them took. Travels with the request.

`first_token` ends the time to first token: the prefill worker itself sends that token, so what follows (`handoff_wait`, `transfer`,
`first_step`) lies between the first token and the second, and is no part of it.
"""

from collections.abc import Mapping
from typing import Literal

from .codec import Message

Moment = Literal[
    "received",
    "submitted",
    "again",
    "taken",
    "routed",
    "prefill_taken",
    "prefilled",
    "first_token",
    "claimed",
    "pulled",
    "second_token",
    "ended",
]
Stage = Literal[
    "accept",
    "earlier_attempts",
    "queue",
    "routing",
    "prefill_queue",
    "prefill",
    "handoff_wait",
    "transfer",
    "first_step",
    "generation",
]

ENDS_AT: dict[Stage, Moment] = {
    "accept": "submitted",
    "earlier_attempts": "again",
    "queue": "taken",
    "routing": "routed",
    "prefill_queue": "prefill_taken",
    "prefill": "prefilled",
    "handoff_wait": "claimed",
    "transfer": "pulled",
    "first_step": "second_token",
    "generation": "ended",
}
"""In their order. A stage begins where the one before it ended; one whose end nobody saw is counted in the next."""
TTFT_STAGES: tuple[Stage, ...] = ("accept", "earlier_attempts", "queue", "routing", "prefill_queue", "prefill")
"""Together with the delivery to the reader, which only the reader knows, they are the time to first token."""
_GOING_ON: dict[Moment, Stage] = {
    "received": "accept",
    "submitted": "queue",
    "again": "queue",
    "taken": "routing",
    "routed": "prefill_queue",
    "prefill_taken": "prefill",
    "claimed": "transfer",
    "pulled": "first_step",
}
"""What was under way at a moment, for a request that ended in the middle of it."""


class Timeline(Message):
    """All but `InferenceRequest.submitted_ns` and `Terminal.ended_ns`. 0: it has not happened, or nobody saw it.

    received: the gateway had the HTTP request, or the client was called. again: the present attempt was put on the queue, when it is not
    the first. taken: a router fetched it. routed: its job was published. prefill_taken: the worker fetched the job. prefilled: the
    present attempt's prompt is done. first_token: the first token of the answer was sent, by the first attempt that came so far.
    claimed: a decode worker has the handoff, and room. pulled: the KV cache is there. second_token: the first one that decode made.
    """

    received_ns: int = 0
    again_ns: int = 0
    taken_ns: int = 0
    routed_ns: int = 0
    prefill_taken_ns: int = 0
    prefilled_ns: int = 0
    first_token_ns: int = 0
    claimed_ns: int = 0
    pulled_ns: int = 0
    second_token_ns: int = 0

    def anew(self, now_ns: int) -> "Timeline":
        """Of the next attempt, as it is put on the queue."""
        return Timeline(received_ns=self.received_ns, first_token_ns=self.first_token_ns, again_ns=now_ns)


def moments(times: Timeline, submitted_ns: int, ended_ns: int = 0) -> dict[Moment, int]:
    """Those that are known, in the order in which a request passes them. One without `received` begins with `submitted`."""
    known: dict[Moment, int] = {
        "received": times.received_ns or submitted_ns,
        "submitted": submitted_ns,
        "again": times.again_ns,
        "taken": times.taken_ns,
        "routed": times.routed_ns,
        "prefill_taken": times.prefill_taken_ns,
        "prefilled": times.prefilled_ns,
        "first_token": times.first_token_ns,
        "claimed": times.claimed_ns,
        "pulled": times.pulled_ns,
        "second_token": times.second_token_ns,
        "ended": ended_ns,
    }
    return {moment: at_ns for moment, at_ns in known.items() if at_ns}


def stages(at: Mapping[Moment, float], unit_s: float = 1e-9) -> dict[Stage, float]:
    """Seconds of each stage that is over; together they are the time from the first moment to the last. Pure.

    A request that ended in the middle of a stage has that one as its last. Moments were written by processes whose clocks differ by
    less than a millisecond: one that seems to lie before the moment before it makes a stage of no length.
    """
    lengths: dict[Stage, float] = {}
    if "received" not in at:
        return lengths
    last: Moment = "received"
    last_at = at[last]
    for stage, moment in ENDS_AT.items():
        if moment in at:
            now = max(last_at, at[moment])
            lengths[_GOING_ON.get(last, stage) if moment == "ended" else stage] = (now - last_at) * unit_s
            last, last_at = moment, now
    return lengths


def ttft_s(at: Mapping[Moment, float], unit_s: float = 1e-9) -> float | None:
    """From the call to the sending of the first token."""
    return max(0.0, at["first_token"] - at["received"]) * unit_s if "first_token" in at and "received" in at else None
