"""Read by the router: a validated, tokenised request from `jw.requests.<model>.<class>`."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from .codec import Message
from .timeline import Moment, Timeline, moments

SafeToken = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,96}$")]
"""A name that may become part of a subject: request ids, worker names, gateway names."""

TenantName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}$")]
TraceParent = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2})?$")]
"""W3C; empty where nothing is traced."""
PriorityClass = Literal["interactive", "batch"]
TokenBytes = Annotated[bytes, Field(description="token ids, little-endian unsigned 32-bit")]


class StructuredOutput(Message):
    """A constraint on the text. `value` is the JSON schema, regular expression, grammar or (newline-separated) choices.

    For models that think before they answer, on engines with a reasoning parser: `reasoning_ended` says whether the constraint
    holds from the first token on (None: the engine looks at the prompt), `reasoning_options` are the parser's, as a JSON object.
    """

    kind: Literal["json", "json_object", "regex", "choice", "grammar", "structural_tag"]
    value: str = ""
    reasoning_ended: bool | None = None
    reasoning_options: str = ""


class TextRules(Message):
    """How an answer's token ids become its text: what whoever reads it without having asked must know."""

    stop: list[str] = []
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True


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

    @property
    def text_rules(self) -> TextRules:
        return TextRules(
            stop=self.stop, include_stop_str_in_output=self.include_stop_str_in_output, skip_special_tokens=self.skip_special_tokens
        )


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
    tenant: str = Field(default="", max_length=64, description="on whose behalf; a label, which decides nothing after the gateway")
    metadata: dict[str, str] = Field(default={}, max_length=16, description="the submitter's own words, given back in the event of its end")
    attempt: int = Field(default=1, ge=1)
    failures: int = Field(default=0, ge=0, description="attempts that ended in a fault; being moved to another worker is none")
    failed_workers: list[SafeToken] = Field(default=[], description="where those faults were, as far as that is known: others try next")
    submitted_ns: int = 0
    times: Timeline = Timeline()
    deadline_ns: int = 0
    trace: TraceParent = Field(default="", description="W3C traceparent of the request's root span; empty: it is not traced")
    trace_state: str = Field(default="", max_length=512, description="W3C tracestate beside it")
    cancel_when_unread: bool = Field(default=False, description="cancelled when the process behind `gateway` is gone for some seconds")

    @property
    def prompt_length_tokens(self) -> int:
        return len(self.prompt_tokens) // 4

    @property
    def moments(self) -> dict[Moment, int]:
        return moments(self.times, self.submitted_ns)

    def stamped(self, **times_ns: int) -> "InferenceRequest":
        """With these moments of its timeline, in server time."""
        return self.model_copy(update={"times": self.times.model_copy(update=times_ns)})
