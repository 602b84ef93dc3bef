"""One HTTP exchange as the two ends of the gateway see it: the front that speaks HTTP, and the engine client behind vLLM.

They share it through a context variable, because vLLM's handlers in between know nothing of it.
"""

import json
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast

from ...pipeline.tracing import Root
from ...schemas.replies import AnyTerminal, TokenChunk
from ...schemas.requests import InferenceRequest, PriorityClass
from .failures import Failure
from .gate import Grant

if TYPE_CHECKING:
    from .streaming import Streaming

EXCHANGE_KEY = "jetwake.exchange"
"""In the scope of a call from inside this process: what the caller knows of it already. No client can set it."""
_CLIENT_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}\Z")


def new_request_id() -> str:
    return uuid.uuid4().hex


def metadata_in(header: str | None) -> dict[str, str]:
    """The submitter's own words, as a JSON object of texts. Raises ValueError; the limits are those of OpenAI's `metadata`."""
    if header is None:
        return {}
    try:
        fields: Any = json.loads(header)
    except ValueError:
        fields = None
    given = cast(dict[str, Any], fields) if isinstance(fields, dict) else None
    if (
        given is None
        or len(given) > 16
        or any(not isinstance(text, str) or len(text) > 512 or len(name) > 64 for name, text in given.items())
    ):
        raise ValueError("metadata must be a JSON object of at most 16 texts, names of up to 64 characters and texts of up to 512")
    return given


def clean_client_id(given: str | None) -> str | None:
    """A client's own id for a request, when it is one that may be echoed: short, and of plain characters."""
    return given if given is not None and _CLIENT_ID.match(given) else None


class Replies(Protocol):
    """The replies of one request, whole or as they come: what of a `ReplyStream` is needed to answer."""

    request_id: str

    @property
    def end_is_next(self) -> bool:
        """The next reply is the end for the answer's length, and it is there already. (vLLM drops the text of a last token of any other end.)"""
        ...

    def close(self) -> None: ...

    def __aiter__(self) -> AsyncIterator[TokenChunk | AnyTerminal]: ...


@dataclass(frozen=True)
class Job:
    """How requests are sent that go on when this gateway ends, and under whose name their replies are. `deadline_ns` in server time."""

    gateway: str
    deadline_ns: int
    submit: Callable[[InferenceRequest], Awaitable[Replies]]


@dataclass
class Exchange:
    """`request_id` is ours; the client's is only echoed. `failure`: why it could not be served, once that is known.

    `answering`: the first tokens are there, so the response is a success so far. `cache_salt`, `tenant`, `grant` and `priority_class`
    are decided by whoever admits the request, never by its body. `admitted`: they are, as whoever made this says. `job`: it is part of
    something that outlives this process. `streaming`: should it be streamed, it can be resumed. `trace_headers`: the trace that whoever
    asks is in. `root`: the trace of what became of it, once something has.
    """

    request_id: str = field(default_factory=new_request_id)
    begun_monotonic_ns: int = field(default_factory=time.monotonic_ns)
    client_id: str | None = None
    cache_salt: str = ""
    priority_class: PriorityClass | None = None
    failure: Failure | None = None
    answering: bool = False
    submitted: int = 0
    tenant: str = ""
    admitted: bool = False
    metadata: dict[str, str] = field(default_factory=dict[str, str])
    grant: Grant | None = None
    timeout_s: float | None = None
    job: "Job | None" = None
    streaming: "Streaming | None" = None
    trace_headers: dict[str, str] = field(default_factory=dict[str, str])
    root: Root | None = None

    def next_request_id(self) -> str:
        """One HTTP request may need several of ours: several prompts, n answers. The first has the exchange's own id."""
        number, self.submitted = self.submitted, self.submitted + 1
        return self.request_id if number == 0 else f"{self.request_id}-{number}"


_current: ContextVar[Exchange | None] = ContextVar("jetwake_exchange", default=None)


def begin(exchange: Exchange) -> None:
    """For this task and those it starts."""
    _current.set(exchange)


def current() -> Exchange:
    """That of the running HTTP request; a new one outside of any."""
    return _current.get() or Exchange()
