"""What is shown, as data: one `Snapshot`, which the page gets as JSON and the terminal draws.

Numbers are seconds, bytes, tokens and shares (0 to 1); None where nothing is known. Everything that came from outside is text, and
nothing here carries a prompt, an answer or a token id.
"""

from dataclasses import dataclass, field

from .verdict import Finding


@dataclass(frozen=True)
class WorkerView:
    """`waiting`: jobs in its own queue. `prefill_left_s`: until the prefills it has in hand are done."""

    worker: str
    incarnation: str
    role: str
    state: str
    told: bool
    waiting: int
    running: int
    slots: int
    used_blocks: int
    held_blocks: int
    wanted_blocks: int
    blocks: int
    held_handoffs: int
    prefill_left_s: float
    peers: int
    domain: str


@dataclass(frozen=True)
class PoolView:
    """`short`: which of its legs is short of workers: `prefill`, `decode`, both or none."""

    pool: str
    model: str
    engine: str
    handoffs_waiting: int
    handoffs_held: int
    short: tuple[str, ...]
    prefill: list[WorkerView]
    decode: list[WorkerView]
    aggregated: list[WorkerView]


@dataclass(frozen=True)
class QueueView:
    """`waiting`: nobody has them yet. `held`: routers do, and keep them back until a worker is almost free."""

    priority_class: str
    waiting: int
    held: int


@dataclass(frozen=True)
class Percentiles:
    count: int
    mean_s: float | None
    p50_s: float | None
    p90_s: float | None
    p99_s: float | None


@dataclass(frozen=True)
class StageView:
    stage: str
    mean_s: float


@dataclass(frozen=True)
class Totals:
    """Rates are those of the last half minute, all else is over the window. Reuse: of the prompt tokens that were prefilled, the share found in caches, and the share routers expected."""

    requests_per_s: float
    ended: dict[str, int]
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    attempts_mean: float | None
    reuse_real: float | None
    reuse_predicted: float | None
    moved_bytes_per_s: float
    transfer_s: float | None
    bytes_per_transfer: float | None
    ttft: Percentiles
    itl: Percentiles
    ttft_stages: list[StageView]
    gap_stages: list[StageView]


@dataclass(frozen=True)
class Lines:
    """One value for each time; None where nothing ended. Percentiles and shares are over the half minute before."""

    time_s: list[int] = field(default_factory=list[int])
    ttft_p50_s: list[float | None] = field(default_factory=list["float | None"])
    ttft_p99_s: list[float | None] = field(default_factory=list["float | None"])
    itl_p50_s: list[float | None] = field(default_factory=list["float | None"])
    itl_p99_s: list[float | None] = field(default_factory=list["float | None"])
    requests_per_s: list[float] = field(default_factory=list[float])
    output_tokens_per_s: list[float] = field(default_factory=list[float])
    prompt_tokens_per_s: list[float] = field(default_factory=list[float])
    reuse_real: list[float | None] = field(default_factory=list["float | None"])
    reuse_predicted: list[float | None] = field(default_factory=list["float | None"])
    moved_bytes_per_s: list[float] = field(default_factory=list[float])
    waiting_prefill: list[int | None] = field(default_factory=list["int | None"])
    waiting_decode: list[int | None] = field(default_factory=list["int | None"])


@dataclass(frozen=True)
class RequestRow:
    id: str
    model: str
    outcome: str
    code: str
    ended_ms: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft_s: float | None
    total_s: float | None
    attempt: int
    prefill_worker: str
    decode_worker: str


@dataclass(frozen=True)
class Snapshot:
    now_ms: int
    connected: bool
    window_s: int
    model: str
    models: list[str]
    findings: list[Finding]
    queues: list[QueueView]
    durable_jobs: int
    dead_letters: int
    routers: list[dict[str, str]]
    pools: list[PoolView]
    totals: Totals
    lines: Lines
    requests: list[RequestRow]
