"""Read by routers and by whoever asks why: the decisions of the other routers, and explanations."""

from typing import Literal

from pydantic import Field

from .codec import Message
from .kv_events import HashBytes
from .requests import InferenceRequest, SafeToken


class Routed(Message):
    """On `jw.routed.<router>`: this router has given a request to a lane. Other routers count it and expect its blocks there.

    `sequence` is that of the lane's queue; `work_s` the prefill time expected; `hashes` the prompt's blocks.
    """

    type: Literal["routed"] = "routed"
    router: SafeToken
    request_id: SafeToken
    lane: SafeToken
    sequence: int = Field(ge=0)
    work_s: float = 0.0
    hashes: HashBytes = b""


class RouterHere(Message):
    """The answer to `jw.routers`. `kept`: requests that wait there until a worker is almost free; `in_hand` counts them too."""

    type: Literal["router_here"] = "router_here"
    router: SafeToken
    policy: str
    in_hand: int = 0
    kept: int = 0
    index_blocks: int = Field(default=0, description="distinct KV blocks it knows of")


class Explain(Message):
    """On `jw.explain`: where would `request` go, or where did the request with this id go? One of the two is given."""

    type: Literal["explain"] = "explain"
    request: InferenceRequest | None = None
    request_id: str = ""


class ConsideredLane(Message):
    """One candidate of a decision. `score` is the expected seconds to the first token, or what else the policy compares."""

    lane: SafeToken
    role: str
    score: float
    words: str


class Explanation(Message):
    """Why a request went, or would go, to `lane`. Empty `lane`: nowhere, for the reason given."""

    type: Literal["explanation"] = "explanation"
    router: SafeToken
    request_id: str = ""
    policy: str
    lane: str = ""
    reason: str
    predicted_cached_tokens: int = 0
    considered: list[ConsideredLane] = []
