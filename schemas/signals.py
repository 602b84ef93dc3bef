"""Every name that a Jetwake tells of itself: metrics with their labels and buckets, spans, attributes, events. Frozen data.

Names follow OpenTelemetry, and its conventions for generative AI where there is one. No label ever holds a request's id, a tenant, or a
name that a client made up: each says which values it has. `docs/signals.md` is made of this.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from .errors import JetwakeError
from .timeline import ENDS_AT

OTHER = "other"
"""In place of a value that a label does not have."""
SERVICE = "jetwake"
Unit = Literal["s", "By", "{token}", "{request}", "{block}", "{slot}", "{handoff}", "{response}", "{letter}", "{lease}", "{transfer}"]


@dataclass(frozen=True, eq=False)
class Label:
    """`values`: all there are; empty where they are a system's own names, then `meaning` says which, and that bounds them."""

    name: str
    meaning: str
    values: tuple[str, ...] = ()

    def bound(self, value: str) -> str:
        return value if not self.values or value in self.values else OTHER


@dataclass(frozen=True, eq=False)
class Metric:
    """`role`: the processes that export it."""

    name: str
    kind: Literal["counter", "histogram", "gauge"]
    unit: Unit
    meaning: str
    role: str
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def prometheus(self) -> str:
        """As Prometheus sees it. A histogram has this with `_bucket`, `_sum` and `_count`."""
        unit = {"s": "_seconds", "By": "_bytes"}.get(self.unit, "")
        base = self.name.replace(".", "_")
        return (base if not unit or base.endswith(unit) else base + unit) + ("_total" if self.kind == "counter" else "")


@dataclass(frozen=True, eq=False)
class Span:
    name: str
    meaning: str


@dataclass(frozen=True, eq=False)
class Attribute:
    """Of a span or an event. Spans may hold what labels must not: they are samples, not series."""

    name: str
    meaning: str


def _codes(error: type[JetwakeError]) -> set[str]:
    return {error.code}.union(*(_codes(child) for child in error.__subclasses__()))


SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
SHORT_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
TOKENS = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16_384.0, 65_536.0, 262_144.0)

# ------------------------------------------------------------------------------------------------------------------- labels

Outcome = Literal["finished", "failed", "cancelled", "expired"]
DELIVERY = "delivery"

MODEL = Label("model", "a model of the catalogue, which only workers add to")
REQUEST_MODEL = Label("gen_ai.request.model", MODEL.meaning)
OPERATION = Label("gen_ai.operation.name", "always the same: tokens in, tokens out", ("text_completion",))
PROVIDER = Label("gen_ai.provider.name", "always the same", (SERVICE,))
TOKEN_TYPE = Label("gen_ai.token.type", "of the prompt, or of the answer", ("input", "output"))
ERROR_TYPE = Label("error.type", "the code of the error, or empty when there was none", ("", *sorted(_codes(JetwakeError))))
CODE = Label("code", "the code of the error, or empty when there was none", ERROR_TYPE.values)
STAGE = Label("stage", "a stage of the timeline, or the delivery of the first token", (*ENDS_AT, DELIVERY))
OUTCOME = Label("outcome", "how it ended", get_args(Outcome))
FAULT = Label("fault", "whether it counts as a failure of the request", ("true", "false"))
LETTER_STAGE = Label(
    "stage",
    "where it could not be processed",
    ("routing", "prefill", "decode", "aggregated", "takeover", "drain", "attempts", "openai-jobs", "batches"),
)
ROUTE = Label("route", "a path that the gateway serves, or other")
STATUS = Label("status", "the HTTP status; 499: the client left first")
QUEUE = Label("queue", "which kind of queue", ("requests", "prefill", "handoff"))
QUEUE_OWNER = Label("owner", "of requests their class, of prefill the worker, of handoff the pool and its domain")
WORKER = Label("worker", "the worker's name; it exports only its own")
ROLE = Label("role", "of the worker", ("prefill", "decode", "aggregated"))
POLICY = Label("policy", "of the router")

_GEN_AI = (OPERATION, PROVIDER, REQUEST_MODEL)
_OF_WORKER = (WORKER, ROLE)

# ------------------------------------------------------------------------------------------------------------------ metrics

TIME_TO_FIRST_TOKEN = Metric(
    "gen_ai.server.time_to_first_token",
    "histogram",
    "s",
    "from the HTTP request to its first token at the gateway; without requests of the class batch",
    "gateway",
    _GEN_AI,
    SECONDS,
)
TIME_PER_OUTPUT_TOKEN = Metric(
    "gen_ai.server.time_per_output_token",
    "histogram",
    "s",
    "of an answer: from its first token to its last, for each token after the first",
    "gateway",
    _GEN_AI,
    SHORT_SECONDS,
)
REQUEST_DURATION = Metric(
    "gen_ai.server.request.duration",
    "histogram",
    "s",
    "from the HTTP request to the end of its answers",
    "gateway",
    (*_GEN_AI, ERROR_TYPE),
    SECONDS,
)
TOKEN_USAGE = Metric(
    "gen_ai.client.token.usage", "histogram", "{token}", "tokens of a prompt, and given out", "gateway", (*_GEN_AI, TOKEN_TYPE), TOKENS
)
INTER_TOKEN_LATENCY = Metric(
    "jetwake.answer.inter_token_latency",
    "histogram",
    "s",
    "between two outputs of an answer at the gateway, for each token of the second",
    "gateway",
    (MODEL,),
    SHORT_SECONDS,
)
STAGE_DURATION = Metric(
    "jetwake.request.stage.duration",
    "histogram",
    "s",
    "one stage of a request's way, told by whoever ended it; delivery by the gateway",
    "router, workers, gateway",
    (STAGE, MODEL),
    SECONDS,
)
REQUESTS_ENDED = Metric(
    "jetwake.requests.ended", "counter", "{request}", "requests that ended here, once each", "router, workers", (OUTCOME, CODE)
)
REQUESTS_RETRIED = Metric(
    "jetwake.requests.retried", "counter", "{request}", "attempts put on the queue after the first", "router, workers", (CODE, FAULT)
)
REQUESTS_REFUSED = Metric("jetwake.requests.refused", "counter", "{request}", "refused before they were on the queue", "gateway", (CODE,))
DEAD_LETTERS = Metric("jetwake.dead_letters", "counter", "{letter}", "kept for an operator", "router, workers, gateway", (LETTER_STAGE,))
GATEWAY_RESPONSES = Metric("jetwake.gateway.responses", "counter", "{response}", "HTTP responses that ended", "gateway", (ROUTE, STATUS))
GATEWAY_RESPONSE_DURATION = Metric(
    "jetwake.gateway.response.duration", "histogram", "s", "from an HTTP request to the end of its response", "gateway", (), SECONDS
)
GATEWAY_OPEN_RESPONSES = Metric("jetwake.gateway.open_responses", "gauge", "{response}", "HTTP responses that have not ended", "gateway")
ROUTER_DECISIONS = Metric("jetwake.router.decisions", "counter", "{request}", "requests given to a worker", "router", (POLICY, MODEL))
ROUTER_LOOKUP_DURATION = Metric(
    "jetwake.router.lookup.duration",
    "histogram",
    "s",
    "hashing a prompt and finding which worker holds how much of it",
    "router",
    (),
    SHORT_SECONDS,
)
ROUTER_IN_HAND = Metric("jetwake.router.in_hand", "gauge", "{request}", "requests the router decides on, or keeps back", "router")
PREFILL_PROMPT_TOKENS = Metric(
    "jetwake.prefill.prompt_tokens", "counter", "{token}", "prompt tokens of prefills that ended", "workers", (MODEL,)
)
PREFILL_CACHED_TOKENS = Metric(
    "jetwake.prefill.cached_tokens", "counter", "{token}", "of these, found in the cache of the worker that prefilled", "workers", (MODEL,)
)
PREFILL_PREDICTED_TOKENS = Metric(
    "jetwake.prefill.predicted_cached_tokens", "counter", "{token}", "what routers had expected of them", "workers", (MODEL,)
)
ANSWER_TOKENS = Metric("jetwake.answer.tokens", "counter", "{token}", "tokens made for answers", "workers", (MODEL,))
TRANSFER_BYTES = Metric("jetwake.transfer.size", "counter", "By", "KV cache pulled through NIXL", "decode", (MODEL,))
TRANSFER_DURATION = Metric(
    "jetwake.transfer.duration", "histogram", "s", "how long NIXL moved the cache of a request", "decode", (MODEL,), SHORT_SECONDS
)
TRANSFER_FAILURES = Metric("jetwake.transfer.failures", "counter", "{transfer}", "pulls that failed", "decode", (MODEL,))
LEASES_EXPIRED = Metric(
    "jetwake.leases.expired", "counter", "{lease}", "handoffs whose blocks were freed because nobody pulled in time", "prefill"
)
BUS_ROUND_TRIP = Metric("jetwake.bus.round_trip", "histogram", "s", "a question to the broker and its answer", "all", (), SHORT_SECONDS)
BUS_STORE_DURATION = Metric(
    "jetwake.bus.store.duration", "histogram", "s", "until the broker said that a message is stored", "all", (), SHORT_SECONDS
)
PROCESS_STARTED = Metric("jetwake.process.started", "gauge", "s", "when this process began to tell of itself, in seconds since 1970", "all")
QUEUE_WAITING = Metric("jetwake.queue.waiting", "gauge", "{request}", "in a queue, held by nobody", "router", (QUEUE, QUEUE_OWNER))
QUEUE_IN_HAND = Metric("jetwake.queue.in_hand", "gauge", "{request}", "taken from a queue and not done", "router", (QUEUE, QUEUE_OWNER))
QUEUE_OLDEST_AGE = Metric(
    "jetwake.queue.oldest_age", "gauge", "s", "how long the first that nobody holds has waited", "router", (QUEUE, QUEUE_OWNER)
)
WORKER_FREE_SLOTS = Metric("jetwake.worker.free_slots", "gauge", "{slot}", "requests it would take now", "workers", _OF_WORKER)
WORKER_RUNNING = Metric("jetwake.worker.running_requests", "gauge", "{request}", "in hand", "workers", _OF_WORKER)
WORKER_FREE_BLOCKS = Metric("jetwake.worker.free_blocks", "gauge", "{block}", "KV blocks in no use", "workers", _OF_WORKER)
WORKER_USED_BLOCKS = Metric(
    "jetwake.worker.used_blocks", "gauge", "{block}", "KV blocks in use, held ones among them", "workers", _OF_WORKER
)
WORKER_HELD_BLOCKS = Metric(
    "jetwake.worker.held_blocks", "gauge", "{block}", "kept for decode workers that have not pulled", "workers", _OF_WORKER
)
WORKER_HELD_HANDOFFS = Metric("jetwake.worker.held_handoffs", "gauge", "{handoff}", "whose blocks are kept", "workers", _OF_WORKER)
WORKER_STEP_AGE = Metric(
    "jetwake.worker.step_age", "gauge", "s", "since its engine made progress; 0 while it has nothing to do", "workers", _OF_WORKER
)

METRICS: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))

# -------------------------------------------------------------------------------------------------------------------- spans

REQUEST_SPAN = Span("request", "the root: from the HTTP request, or the client's call, to the end of the answer")
ROUTE_SPAN = Span("route", "from the router's taking it to the job on a worker's queue; its event says why there")
PREFILL_SPAN = Span("prefill", "the first leg, from the worker's taking the job")
TRANSFER_SPAN = Span("transfer", "the KV cache on its way, from the claim of the handoff")
DECODE_SPAN = Span("decode", "the second leg, from the worker's taking the handoff to the end of the answer")
GENERATE_SPAN = Span("generate", "both legs in one engine")
ATTEMPT_SPAN = Span("attempt", "an attempt that came to nothing, from being put on the queue to being given up for the next")

SPANS: tuple[Span, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Span))
DECISION_EVENT = "jetwake.routing.decision"
"""On the route span."""

REQUEST_ID = Attribute("jetwake.request.id", "the id of the request")
ATTEMPT = Attribute("jetwake.attempt", "which attempt, from 1")
SPAN_WORKER = Attribute("jetwake.worker", "the worker, or the router")
WAITED_S = Attribute("jetwake.waited_s", "seconds that it had waited in the queue before the span")
REQUEST_MODEL_ATTRIBUTE = Attribute(REQUEST_MODEL.name, "the model")
INPUT_TOKENS = Attribute("gen_ai.usage.input_tokens", "tokens of the prompt")
OUTPUT_TOKENS = Attribute("gen_ai.usage.output_tokens", "tokens of the answer so far")
CACHED_TOKENS = Attribute("gen_ai.usage.cache_read.input_tokens", "prompt tokens that prefill found in its cache")
PREDICTED_TOKENS = Attribute("jetwake.predicted_cached_tokens", "what the router expected of that")
FINISH_REASONS = Attribute("gen_ai.response.finish_reasons", "why the answer ended")
TRANSFER_SIZE = Attribute("jetwake.transfer.size", "bytes pulled")
TRANSFER_NIXL_S = Attribute("jetwake.transfer.nixl_s", "how long NIXL says that it moved them")
SPAN_ERROR = Attribute(ERROR_TYPE.name, "the code of the error that ended the span; the status has its text")
DECISION_POLICY = Attribute("jetwake.routing.policy", "the policy that decided")
DECISION_LANE = Attribute("jetwake.routing.lane", "the worker it chose, with its incarnation")
DECISION_REASON = Attribute("jetwake.routing.reason", "why, in words")
DECISION_LANES = Attribute("jetwake.routing.candidates", "all that were considered, best first")
DECISION_SCORES = Attribute("jetwake.routing.scores", "the score of each, lower is better")
DECISION_WORDS = Attribute("jetwake.routing.words", "what each score is made of")

ATTRIBUTES: tuple[Attribute, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Attribute))
