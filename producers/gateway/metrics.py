"""What a gateway counts and measures. No name from a client becomes a label; all that is kept of one is its model, when it is ours."""

import time
from collections.abc import AsyncIterator

from ...pipeline import instruments
from ...schemas import signals
from ...schemas.replies import AnyTerminal, TokenChunk
from ...schemas.tokens import token_count
from .exchange import Replies

_GEN_AI = (signals.OPERATION.values[0], signals.PROVIDER.values[0])


class GatewayMetrics:
    """For the responses of one process."""

    def __init__(self) -> None:
        self._open = 0

    def opened(self) -> None:
        self._open += 1
        instruments.show(signals.GATEWAY_OPEN_RESPONSES, self._open)

    def closed(self, route: str, status: int, duration_s: float) -> None:
        self._open -= 1
        instruments.show(signals.GATEWAY_OPEN_RESPONSES, self._open)
        instruments.add(signals.GATEWAY_RESPONSES, 1, route, str(status))
        instruments.record(signals.GATEWAY_RESPONSE_DURATION, duration_s)

    def refused(self, code: str) -> None:
        instruments.add(signals.REQUESTS_REFUSED, 1, code)

    def ended(self, model: str, begun_monotonic_ns: int, prompt_tokens: int, given_tokens: int, code: str) -> None:
        """The answers of one prompt."""
        instruments.record(signals.REQUEST_DURATION, _since_s(begun_monotonic_ns), *_GEN_AI, model, code)
        instruments.record(signals.TOKEN_USAGE, prompt_tokens, *_GEN_AI, model, "input")
        instruments.record(signals.TOKEN_USAGE, given_tokens, *_GEN_AI, model, "output")


def _since_s(begun_monotonic_ns: int) -> float:
    return (time.monotonic_ns() - begun_monotonic_ns) / 1e9


class Watched:
    """Replies on their way to a client: they pass, and their times are noted. `ahead_ns`: server time less this machine's clock.

    `begun_monotonic_ns`: when the time to first token begins; 0 where nobody waits for it. It ends when the token is here, also for a
    client that gets its answer in one piece.
    """

    def __init__(self, replies: Replies, model: str, ahead_ns: int, begun_monotonic_ns: int = 0) -> None:
        self.request_id = replies.request_id
        self._replies = replies
        self._model = model
        self._ahead_ns = ahead_ns
        self._begun_monotonic_ns = begun_monotonic_ns
        self._first_ns = self._last_ns = self._tokens = 0

    @property
    def end_is_next(self) -> bool:
        return self._replies.end_is_next

    def close(self) -> None:
        self._replies.close()

    async def __aiter__(self) -> AsyncIterator[TokenChunk | AnyTerminal]:
        async for reply in self._replies:
            if not isinstance(reply, TokenChunk):
                self._ended(reply)
            elif new := token_count(reply.tokens):
                self._given(new)
            yield reply

    def _given(self, new: int) -> None:
        now_ns = time.monotonic_ns()
        if self._last_ns:
            instruments.record(signals.INTER_TOKEN_LATENCY, (now_ns - self._last_ns) / 1e9 / new, self._model)
        else:
            self._first_ns = now_ns
            if self._begun_monotonic_ns:
                ttft_s = (now_ns - self._begun_monotonic_ns) / 1e9
                instruments.record(signals.TIME_TO_FIRST_TOKEN, ttft_s, *_GEN_AI, self._model)
        self._last_ns = now_ns
        self._tokens += new

    def _ended(self, terminal: AnyTerminal) -> None:
        if self._tokens > 1:
            each_s = (self._last_ns - self._first_ns) / 1e9 / (self._tokens - 1)
            instruments.record(signals.TIME_PER_OUTPUT_TOKEN, each_s, *_GEN_AI, self._model)
        sent_ns = terminal.times.first_token_ns
        if self._first_ns and sent_ns:
            delivery_s = max(0, self._first_ns + self._ahead_ns - sent_ns) / 1e9
            instruments.record(signals.STAGE_DURATION, delivery_s, signals.DELIVERY, self._model)
