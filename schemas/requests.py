"""Read by the router: a validated, tokenised request from `jw.requests.<model>.<class>`."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from .codec import Message

SafeToken = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,96}$")]
"""A name that may become part of a subject: request ids, worker names, gateway names."""

PriorityClass = Literal["interactive", "batch"]
TokenBytes = Annotated[bytes, Field(description="token ids, little-endian unsigned 32-bit")]


class StructuredOutput(Message):
    """A constraint on the text. `value` is the JSON schema, regular expression, grammar or (newline-separated) choices."""

    kind: Literal["json", "json_object", "regex", "choice", "grammar", "structural_tag"]
    value: str = ""


class Sampling(Message):
    """How tokens are drawn and when to end. Names and meanings are those of vLLM's SamplingParams.

    `logprobs`: how many alternatives to report for each token (0: only the drawn one; None: report nothing).
    """

    max_tokens: int = Field(default=256, ge=1)
    min_tokens: int = Field(default=0, ge=0)
    temperature: float = Field(default=1.0, ge=0.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=-1)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    seed: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    repetition_penalty: float = Field(default=1.0, gt=0.0)
    logprobs: int | None = Field(default=None, ge=0, le=20)
    logit_bias: dict[str, float] = {}
    allowed_token_ids: list[int] = []
    bad_words: list[str] = []
    structured_output: StructuredOutput | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False


class InferenceRequest(Message):
    """One prompt, one answer. `deadline_ns` is in server time (0: none); `attempt` fences everything done for it."""

    type: Literal["request"] = "request"
    request_id: SafeToken
    gateway: SafeToken = Field(description="whoever waits for the reply; part of the reply subject")
    model: str = Field(min_length=1, max_length=256)
    priority_class: PriorityClass = "interactive"
    prompt_tokens: TokenBytes
    sampling: Sampling = Sampling()
    lora: str = ""
    cache_salt: str = ""
    session: str = Field(default="", max_length=256, description="turns of one conversation or agent: routers may keep them together")
    attempt: int = Field(default=1, ge=1)
    failures: int = Field(default=0, ge=0, description="attempts that ended in a fault; being moved to another worker is none")
    submitted_ns: int = 0
    deadline_ns: int = 0

    @property
    def prompt_length_tokens(self) -> int:
        return len(self.prompt_tokens) // 4
