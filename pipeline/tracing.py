"""Spans of requests, through OpenTelemetry's API alone: they come to nothing until `telemetry` was begun in this process.

One trace for each request. Whoever makes the request makes its root; the request carries that to every process (W3C trace context), and
what each does for it is a child of the root, attempts after the first as well. Times are server time, as those of the timeline.
"""

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ..schemas import signals
from ..schemas.errors import JetwakeError
from ..schemas.requests import InferenceRequest
from ..schemas.signals import SERVICE, Attribute, Span
from ..schemas.subjects import TRACEPARENT_HEADER, TRACESTATE_HEADER
from .settle import NOT_NOW

Value = str | int | float | Sequence[str] | Sequence[float]
Attributes = Mapping[Attribute, Value]

_PROPAGATOR = TraceContextTextMapPropagator()
_SAMPLED = 1


class Root:
    """The root of one trace, from its making on. `end` once."""

    def __init__(self, now_ns: Callable[[], int], start_ns: int, kind: SpanKind, headers: Mapping[str, str] | None = None) -> None:
        """`headers`: a trace context of whoever asks, which this joins. Names in lower case."""
        above = _PROPAGATOR.extract(dict(headers)) if headers else Context()
        self._now_ns = now_ns
        self._span = trace.get_tracer(SERVICE).start_span(signals.REQUEST_SPAN.name, above, kind, start_time=start_ns)
        carried: dict[str, str] = {}
        _PROPAGATOR.inject(carried, trace.set_span_in_context(self._span))
        self.parent = carried.get(TRACEPARENT_HEADER, "")
        self.state = carried.get(TRACESTATE_HEADER, "")[:512]

    def carried_by(self, request: InferenceRequest) -> InferenceRequest:
        """The request, which has this trace from now on."""
        if self._span.is_recording():
            model = signals.REQUEST_MODEL_ATTRIBUTE.name
            self._span.set_attributes({signals.REQUEST_ID.name: request.request_id, model: request.model})
        return request.model_copy(update={"trace": self.parent, "trace_state": self.state}) if self.parent else request

    def end(self, attributes: Attributes | None = None, error_code: str = "", error_text: str = "") -> None:
        if self._span.is_recording():
            self._span.set_attributes(_named(attributes or {}))
            if error_code:
                _note_error(self._span, error_code, error_text)
        self._span.end(self._now_ns())


class Leg:
    """What one process does for a request: a span that ends with the body, in success or with the error that leaves it.

    An error that only means "not now" leaves no span: the message comes again.
    """

    def __init__(self, span: Span, request: InferenceRequest, worker: str, now_ns: Callable[[], int], since: int = 0) -> None:
        """`since`: when it was put where it waited for this; 0: unknown."""
        self.attributes: dict[Attribute, Value] = {}
        self.events: list[tuple[str, Attributes]] = []
        self._span = span
        self._request = request
        self._worker = worker
        self._now_ns = now_ns
        self._since_ns = since
        self._start_ns = now_ns() if is_sampled(request) else 0

    @property
    def wanted(self) -> bool:
        """Whether attributes are worth their making."""
        return self._start_ns > 0

    def __enter__(self) -> "Leg":
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        if not self.wanted or isinstance(error, NOT_NOW):
            return
        if self._since_ns:
            self.attributes[signals.WAITED_S] = max(0, self._start_ns - self._since_ns) / 1e9
        record(
            self._span, self._request, self._worker, self._start_ns, self._now_ns(),
            attributes=self.attributes, error=error, events=self.events,
        )  # fmt: skip


def is_sampled(request: InferenceRequest) -> bool:
    """Whether spans of it are kept: that is decided with the root."""
    return bool(request.trace) and bool(int(request.trace[-2:], 16) & _SAMPLED)


def record(
    span: Span,
    request: InferenceRequest,
    worker: str,
    start_ns: int,
    end_ns: int,
    *,
    attributes: Attributes | None = None,
    error: BaseException | None = None,
    events: Sequence[tuple[str, Attributes]] = (),
) -> None:
    """A child of the request's root that is over."""
    if not is_sampled(request):
        return
    above = _PROPAGATOR.extract({TRACEPARENT_HEADER: request.trace, TRACESTATE_HEADER: request.trace_state})
    own: dict[Attribute, Value] = {
        signals.REQUEST_ID: request.request_id,
        signals.ATTEMPT: request.attempt,
        signals.SPAN_WORKER: worker,
        signals.REQUEST_MODEL_ATTRIBUTE: request.model,
        **(attributes or {}),
    }
    made = trace.get_tracer(SERVICE).start_span(span.name, above, SpanKind.CONSUMER, _named(own), start_time=start_ns)
    for name, facts in events:
        made.add_event(name, _named(facts), end_ns)
    if error is not None:
        _note_error(made, error.code if isinstance(error, JetwakeError) else JetwakeError.code, str(error))
    made.end(max(start_ns, end_ns))


def _note_error(span: trace.Span, code: str, text: str) -> None:
    span.set_attribute(signals.SPAN_ERROR.name, code)
    span.set_status(Status(StatusCode.ERROR, f"{code}: {text}"))


def _named(attributes: Attributes) -> dict[str, Value]:
    return {attribute.name: value for attribute, value in attributes.items()}
