"""The story of one request: which stage took how long, where it was, and why it went there.

Made of the event of its end, or of its terminal in `JW_RESULTS` (while it runs, its announcement in `JW_ANSWERS`), and of what routers
remember. The page and `jetwake request` show the same. No prompt, answer or token id is in it.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ...pipeline.connection import Bus
from ...pipeline.jetstream import last_message
from ...schemas import subjects
from ...schemas.codec import decode, encode
from ...schemas.errors import BrokerUnavailable, StreamMissing, UnknownRequest
from ...schemas.events import RequestEnded
from ...schemas.replies import Checkpoint, Expired, Failed, Fence, Finished, Outcome, Terminal
from ...schemas.routing import Explain, Explanation
from ...schemas.streams import ANSWERS, RESULTS
from ...schemas.timeline import Moment, Stage, stages
from ...schemas.tokens import token_count

EXPLAIN_WAIT_S = 0.5
MS, NS = 1e-3, 1e-9
_OUTCOME: Any = Outcome
_ID = re.compile(r"[A-Za-z0-9_-]{1,96}")

MEANING: dict[Stage, str] = {
    "accept": "read, tokenised and stored",
    "earlier_attempts": "attempts that were given up",
    "queue": "waited for a router",
    "routing": "the router decided, or kept it back for a worker to be free",
    "prefill_queue": "waited in the worker's queue",
    "prefill": "the prompt was computed",
    "handoff_wait": "waited for a decode worker with room",
    "transfer": "the KV cache was pulled",
    "first_step": "decode made its first token",
    "generation": "the other tokens",
}


@dataclass(frozen=True)
class Bar:
    """`part`: of the time to the first token, of the gap after it, or of the rest."""

    stage: Stage
    part: str
    meaning: str
    start_s: float
    length_s: float


@dataclass(frozen=True)
class Story:
    """`outcome` is that of the terminal, or `running`."""

    id: str
    outcome: str
    model: str = ""
    reason: str = ""
    error: str = ""
    attempt: int = 1
    prompt_tokens: int = 0
    cached_tokens: int = 0
    predicted_cached_tokens: int = 0
    completion_tokens: int = 0
    prefill_worker: str = ""
    decode_worker: str = ""
    kv_bytes: int = 0
    kv_transfer_s: float = 0.0
    received_ms: int = 0
    ttft_s: float | None = None
    total_s: float | None = None
    bars: list[Bar] = field(default_factory=list[Bar])
    routing: Explanation | None = None
    labels: dict[str, str] = field(default_factory=dict[str, str])

    def as_json(self) -> dict[str, Any]:
        return {**asdict(replace(self, routing=None)), "routing": self.routing.model_dump() if self.routing else None}


def bars(at: Mapping[Moment, float], unit_s: float) -> list[Bar]:
    """One for each stage that is known, one behind the other. Pure."""
    laid: list[Bar] = []
    start_s = 0.0
    for stage, length_s in stages(at, unit_s).items():
        laid.append(Bar(stage, part_of(stage), MEANING[stage], start_s, length_s))
        start_s += length_s
    return laid


def part_of(stage: Stage) -> str:
    if stage in ("handoff_wait", "transfer", "first_step"):
        return "gap"
    return "answer" if stage == "generation" else "first"


def of_event(event: RequestEnded, routing: Explanation | None) -> Story:
    """Pure."""
    return _told(
        event.times_ms,
        MS,
        routing,
        id=event.id,
        outcome=event.outcome,
        model=event.model,
        reason=event.code or event.finish_reason,
        error=event.error,
        attempt=event.attempt,
        prompt_tokens=event.prompt_tokens,
        cached_tokens=event.cached_tokens,
        predicted_cached_tokens=event.predicted_cached_tokens,
        completion_tokens=event.completion_tokens,
        prefill_worker=event.prefill_worker,
        decode_worker=event.decode_worker,
        kv_bytes=event.kv_bytes,
        kv_transfer_s=event.kv_transfer_s,
        labels=labels_of(event),
    )


def labels_of(event: RequestEnded) -> dict[str, str]:
    """What whoever submitted it said of it."""
    given = {"session": event.session, "tenant": event.tenant, **event.metadata}
    return {name: value for name, value in given.items() if value}


def of_terminal(terminal: Terminal, routing: Explanation | None) -> Story:
    """Pure."""
    reason = {Finished: "finish_reason", Failed: "code", Expired: "phase"}.get(type(terminal), "")
    return _told(
        terminal.moments,
        NS,
        routing,
        id=terminal.request_id,
        outcome=str(getattr(terminal, "type", "")),
        model=terminal.model,
        reason=str(getattr(terminal, reason, "")),
        error=terminal.text if isinstance(terminal, Failed) else "",
        attempt=terminal.attempt,
        prompt_tokens=terminal.prompt_length_tokens,
        cached_tokens=terminal.cached_tokens,
        predicted_cached_tokens=terminal.predicted_cached_tokens,
        completion_tokens=token_count(terminal.tokens),
        prefill_worker=terminal.prefill_worker,
        decode_worker=terminal.decode_worker,
        kv_bytes=terminal.kv_bytes,
        kv_transfer_s=terminal.kv_transfer_s,
    )


def _told(at: Mapping[Moment, float], unit_s: float, routing: Explanation | None, **facts: Any) -> Story:
    first, begun, ended = at.get("first_token"), at.get("received"), at.get("ended")
    return Story(
        **facts,
        received_ms=round((begun or ended or 0) * unit_s * 1e3),
        ttft_s=max(0.0, first - begun) * unit_s if first and begun else None,
        total_s=(ended - begun) * unit_s if ended and begun else None,
        bars=bars(at, unit_s),
        routing=routing,
    )


async def read_story(bus: Bus, request_id: str) -> Story:
    """Raises UnknownRequest when nothing of it is kept, and BusError."""
    unknown = UnknownRequest(f"nothing is kept of a request {request_id[:96]}: it ended more than a day ago, or was never accepted")
    if _ID.fullmatch(request_id) is None:  # a wildcard would find somebody's
        raise unknown
    attempt = 1
    if message := await last_message(bus, RESULTS.name, subjects.results_of(request_id)):
        outcome: Terminal | Fence = decode(message.data, _OUTCOME)
        if isinstance(outcome, Terminal):
            return of_terminal(outcome, await routing_of(bus, request_id))
        attempt = outcome.attempt
    if message := await last_message(bus, ANSWERS.name, subjects.answers_of("*", request_id)):
        checkpoint = decode(message.data, Checkpoint)
        routing = await routing_of(bus, request_id)
        return Story(id=request_id, outcome="running", model=checkpoint.model, attempt=max(attempt, checkpoint.attempt), routing=routing)
    raise unknown


async def routing_of(bus: Bus, request_id: str) -> Explanation | None:
    """None when no router remembers it: it was restarted since, or has decided on too many others."""
    try:
        answer = await bus.request(subjects.EXPLAIN, encode(Explain(request_id=request_id)), timeout_s=EXPLAIN_WAIT_S)
    except (BrokerUnavailable, StreamMissing):
        return None
    return decode(answer.data, Explanation)
