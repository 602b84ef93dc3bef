"""Read by whoever waits for an answer, from `jw.replies.<gateway>.<request>` and `jw.results.<model>.<gateway>.<request>`.

Token chunks are numbered by token offset and carry the attempt; a reader takes the highest attempt seen and drops offsets
it already has. An attempt after the first begins with a chunk without tokens, the *fence*: whatever an earlier attempt says after
it does not count. Then it repeats from offset 0 what earlier attempts gave, and goes on after that. Exactly one terminal ends a
request; it repeats all token ids, so that completeness never rests on chunks.
"""

from typing import Annotated, Literal

from pydantic import Field

from .codec import Message
from .requests import SafeToken, TextRules, TokenBytes
from .timeline import Moment, Timeline, moments


class PositionLogprobs(Message):
    """Log probabilities at one output position. Parallel lists; entry 0 is the drawn token, then the most likely ones."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


class TokenChunk(Message):
    """`tokens` start at output offset `offset`; none: the attempt's fence. `logprobs` is empty or has one entry per token.

    `cached_tokens` comes with the first token: prompt tokens found in the cache of the worker that prefilled.
    """

    type: Literal["chunk"] = "chunk"
    request_id: SafeToken
    attempt: int = Field(ge=1)
    offset: int = Field(ge=0)
    tokens: TokenBytes
    logprobs: list[PositionLogprobs] = []
    cached_tokens: int | None = None


class Terminal(Message):
    """What every ending says. `tokens` are all output tokens known at the end."""

    request_id: SafeToken
    model: str = ""
    attempt: int = Field(ge=1)
    tokens: TokenBytes = b""
    logprobs: list[PositionLogprobs] = []
    prompt_length_tokens: int = 0
    cached_tokens: int = Field(default=0, description="prompt tokens found in the cache of the worker that prefilled")
    predicted_cached_tokens: int = Field(default=0, description="what the router expected of `cached_tokens`")
    prefill_worker: str = ""
    decode_worker: str = ""
    kv_bytes: int = Field(default=0, description="bytes of KV cache moved through NIXL for this request")
    kv_transfer_s: float = Field(default=0.0, description="how long NIXL says that it moved them")
    submitted_ns: int = 0
    times: Timeline = Timeline()
    ended_ns: int = 0

    @property
    def moments(self) -> dict[Moment, int]:
        return moments(self.times, self.submitted_ns, self.ended_ns)


class Finished(Terminal):
    """`stop_reason`: the stop string, or the stop token's id as text, when that is what ended it."""

    type: Literal["finished"] = "finished"
    finish_reason: Literal["stop", "length"]
    stop_reason: str = ""
    text_rules: TextRules = TextRules()


class Failed(Terminal):
    """`code` is that of an error in `schemas.errors`; `text` says what to do."""

    type: Literal["failed"] = "failed"
    code: str
    text: str


class Cancelled(Terminal):
    """Somebody cancelled it; `tokens` are those made until then."""

    type: Literal["cancelled"] = "cancelled"


class Expired(Terminal):
    """The deadline passed; `phase` is where that was noticed."""

    type: Literal["expired"] = "expired"
    phase: str = ""


AnyTerminal = Annotated[Finished | Failed | Cancelled | Expired, Field(discriminator="type")]
Reply = Annotated[TokenChunk | Finished | Failed | Cancelled | Expired, Field(discriminator="type")]


class Fence(Message):
    """On `jw.results.*`, where the terminal will be: from here on, no attempt below this one can end the request.

    It is no ending. Only the subject's last message can be one.
    """

    type: Literal["fence"] = "fence"
    request_id: SafeToken
    attempt: int = Field(ge=2)


Outcome = Annotated[Fence | Finished | Failed | Cancelled | Expired, Field(discriminator="type")]
"""What `jw.results.*` carries."""


class Checkpoint(Message):
    """On `jw.answers.<gateway>.<request>.<attempt>`, the last of each kept for minutes: all tokens this attempt gave so far.

    `attempt` 0, without tokens, is the announcement of whoever asked, so that the request can be found while it waits.
    """

    type: Literal["checkpoint"] = "checkpoint"
    request_id: SafeToken
    model: str
    attempt: int = Field(ge=0)
    tokens: TokenBytes = b""
    text_rules: TextRules = TextRules()
    deadline_ns: int = 0


class CancelRequest(Message):
    """On `jw.cancel.<request>`: whoever holds this request ends it.

    With `below_attempt` only earlier attempts are meant: they end without a word, because a later one goes on.
    """

    type: Literal["cancel"] = "cancel"
    request_id: SafeToken
    below_attempt: int = Field(default=0, ge=0)
    reason: str = ""


class DeadLetter(Message):
    """On `jw.dead.<stage>`: what could not be processed, with the bytes as they came."""

    type: Literal["dead_letter"] = "dead_letter"
    stage: SafeToken
    subject: str
    code: str
    text: str
    payload: bytes
    request_id: str = ""
    attempts: int = 0
    deliveries: int = 0
    worker: str = ""
    dead_ns: int = 0
