"""What a router says of its decisions in a trace, and where a request that nobody gave one may have its trace. Pure."""

from collections.abc import Mapping

from ..pipeline.tracing import Attributes
from ..schemas import signals
from ..schemas.headers import is_traceparent
from ..schemas.requests import InferenceRequest
from ..schemas.routing import Explanation
from ..schemas.subjects import TRACEPARENT_HEADER, TRACESTATE_HEADER


def traced(request: InferenceRequest, headers: Mapping[str, str]) -> InferenceRequest:
    """The request. One that was published without a gateway or a client may have its trace in the message's headers alone."""
    parent = headers.get(TRACEPARENT_HEADER, "")
    if request.trace or not is_traceparent(parent):
        return request
    return request.model_copy(update={"trace": parent, "trace_state": headers.get(TRACESTATE_HEADER, "")[:512]})


def decision_facts(decided: Explanation) -> Attributes:
    return {
        signals.DECISION_POLICY: decided.policy,
        signals.DECISION_LANE: decided.lane,
        signals.DECISION_REASON: decided.reason,
        signals.PREDICTED_TOKENS: decided.predicted_cached_tokens,
        signals.DECISION_LANES: [lane.lane for lane in decided.considered],
        signals.DECISION_SCORES: [lane.score for lane in decided.considered],
        signals.DECISION_WORDS: [lane.words for lane in decided.considered],
    }
