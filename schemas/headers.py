"""The headers of every message that carries a request: whom to tell when it cannot even be decoded, and the trace it belongs to."""

from .requests import InferenceRequest
from .subjects import REQUEST_ID_HEADER, TRACEPARENT_HEADER, TRACESTATE_HEADER, reply_target


def request_headers(request: InferenceRequest) -> dict[str, str]:
    headers = {REQUEST_ID_HEADER: reply_target(request.model, request.gateway, request.request_id)}
    if request.trace:
        headers[TRACEPARENT_HEADER] = request.trace
        if request.trace_state:
            headers[TRACESTATE_HEADER] = request.trace_state
    return headers
