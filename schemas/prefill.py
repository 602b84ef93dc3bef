"""Read by prefill and aggregated workers: a job from `jw.prefill.<worker>-<incarnation>`, and the order to release blocks."""

from typing import Literal

from pydantic import Field

from .codec import Message
from .requests import InferenceRequest, SafeToken


class PrefillJob(Message):
    """A request, given by a router to this worker. `reason` says in words why the policy chose it."""

    type: Literal["prefill_job"] = "prefill_job"
    request: InferenceRequest
    router: SafeToken
    reason: str = Field(default="", max_length=4096)
    predicted_cached_tokens: int = Field(default=0, ge=0, description="prompt tokens the router expects in this worker's cache")

    @property
    def new_tokens(self) -> int:
        """Prompt tokens the router expects to be computed."""
        return max(0, self.request.prompt_length_tokens - self.predicted_cached_tokens)


class ReleaseKv(Message):
    """On `jw.release.<worker>-<incarnation>`: nobody will pull the blocks held for this engine request."""

    type: Literal["release_kv"] = "release_kv"
    request_id: SafeToken
    engine_request_id: str
    reason: str = ""
