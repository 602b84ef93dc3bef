"""What is told to the world when a request has ended, on `jw.events.<model>.<outcome>`: small, and JSON, for readers of any kind.

It does not carry the answer. Who asked has that; others find the terminal in `jw.results.<model>.<gateway>.<id>`.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict

from .replies import AnyTerminal, Failed, Finished
from .requests import InferenceRequest
from .timeline import Moment
from .tokens import token_count

Ending = Literal["finished", "failed", "cancelled", "expired"]


class RequestEnded(BaseModel):
    """Times are milliseconds since 1970 by the broker's clock; 0 or empty where it is not known.

    `times_ms`: the moments of its timeline that are known (`schemas.timeline`).
    """

    model_config = ConfigDict(frozen=True)

    type: Literal["request_ended"] = "request_ended"
    id: str
    model: str
    gateway: str
    outcome: Ending
    finish_reason: str = ""
    code: str = ""
    error: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    predicted_cached_tokens: int = 0
    completion_tokens: int = 0
    kv_bytes: int = 0
    kv_transfer_s: float = 0.0
    submitted_ms: int = 0
    ended_ms: int = 0
    times_ms: dict[Moment, float] = {}
    attempt: int = 1
    prefill_worker: str = ""
    decode_worker: str = ""
    tenant: str = ""
    session: str = ""
    metadata: dict[str, str] = {}


def request_ended(terminal: AnyTerminal, gateway: str, request: InferenceRequest | None) -> RequestEnded:
    """`request` None: who ended it could not read it."""
    failed = terminal if isinstance(terminal, Failed) else None
    return RequestEnded(
        id=terminal.request_id,
        model=request.model if request is not None else terminal.model,
        gateway=gateway,
        outcome=terminal.type,
        finish_reason=terminal.finish_reason if isinstance(terminal, Finished) else "",
        code=failed.code if failed is not None else "",
        error=failed.text if failed is not None else "",
        prompt_tokens=terminal.prompt_length_tokens or (request.prompt_length_tokens if request is not None else 0),
        cached_tokens=terminal.cached_tokens,
        predicted_cached_tokens=terminal.predicted_cached_tokens,
        completion_tokens=token_count(terminal.tokens),
        kv_bytes=terminal.kv_bytes,
        kv_transfer_s=round(terminal.kv_transfer_s, 6),
        submitted_ms=request.submitted_ns // 1_000_000 if request is not None else 0,
        ended_ms=terminal.ended_ns // 1_000_000,
        times_ms={moment: round(at_ns / 1e6, 2) for moment, at_ns in terminal.moments.items()},
        attempt=terminal.attempt,
        prefill_worker=terminal.prefill_worker,
        decode_worker=terminal.decode_worker,
        tenant=request.tenant if request is not None else "",
        session=request.session if request is not None else "",
        metadata=request.metadata if request is not None else {},
    )
