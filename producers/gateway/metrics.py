"""What a gateway counts, for Prometheus. Label sets are small and fixed: no name from a client becomes a label."""

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class GatewayMetrics:
    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        made: dict[str, Any] = {"registry": self._registry}
        self.open = Gauge("jetwake_gateway_open_responses", "HTTP responses that have not ended", **made)
        self._ended = Counter("jetwake_gateway_responses_total", "HTTP responses by route and status", ["route", "status"], **made)
        self._seconds = Histogram("jetwake_gateway_response_seconds", "From request to the end of its response", buckets=_SECONDS, **made)
        self._first = Histogram(
            "jetwake_gateway_time_to_first_token_seconds", "From submitting to the first token", buckets=_SECONDS, **made
        )
        self._prompt = Counter("jetwake_gateway_prompt_tokens_total", "Prompt tokens of submitted requests", **made)
        self._cached = Counter("jetwake_gateway_cached_tokens_total", "Prompt tokens that prefill found in its cache", **made)
        self._generated = Counter("jetwake_gateway_generated_tokens_total", "Output tokens given to clients", **made)

    def submitted(self, prompt_tokens: int) -> None:
        self._prompt.inc(prompt_tokens)

    def first_token(self, submitted_ns: int, now_ns: int, cached_tokens: int) -> None:
        self._first.observe(max(0.0, (now_ns - submitted_ns) / 1e9))
        self._cached.inc(cached_tokens)

    def generated(self, tokens: int) -> None:
        self._generated.inc(tokens)

    def ended(self, route: str, status: int, seconds: float) -> None:
        self._ended.labels(route, str(status)).inc()
        self._seconds.observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self._registry)
