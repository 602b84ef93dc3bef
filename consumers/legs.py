"""From a request to the leg an engine runs."""

import secrets

from ..schemas.decode import KvReference
from ..schemas.requests import InferenceRequest
from .engine import Leg


def leg_of(request: InferenceRequest, kv: KvReference | None = None, forced_tokens: bytes = b"") -> Leg:
    """The leg runs under an id that is never used twice by an engine: the same job may be delivered twice."""
    return Leg(
        engine_request_id=f"{request.request_id}-{request.attempt}-{secrets.token_hex(3)}",
        prompt_tokens=request.prompt_tokens,
        sampling=request.sampling,
        lora=request.lora,
        cache_salt=request.cache_salt,
        forced_tokens=forced_tokens,
        kv=kv,
    )
