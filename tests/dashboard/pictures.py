"""What tests of the page know: workers, loads and events that never were."""

from typing import Any

from jetwake.deploy.dashboard.history import History
from jetwake.deploy.dashboard.state import Known, SeenRouter
from jetwake.pipeline.topology import QueueCount
from jetwake.schemas.events import RequestEnded
from jetwake.schemas.workers import KvCompatibility, PrefillTiming, WorkerCard, WorkerLoad

NOW_MS = 1_800_000_000_000
POOL = "m-0000"
SAME = KvCompatibility(
    engine="simulated",
    engine_version="1",
    nixl_version="1",
    model="m",
    revision="",
    dtype="f",
    kv_dtype="f",
    block_size_tokens=16,
    tensor_parallel=1,
)


def card(worker: str, role: Any, **fields: Any) -> WorkerCard:
    return WorkerCard(
        **{
            "worker": worker, "incarnation": "i1", "role": role, "model": "m", "pool": POOL, "compatibility": SAME, "capacity_blocks": 100,
            "capacity_slots": 4, "max_model_len_tokens": 1000, "peers": ["p-i1"] if role == "decode" else [], **fields,
        }
    )  # fmt: skip


def load(worker: str, **fields: Any) -> WorkerLoad:
    return WorkerLoad(worker=worker, incarnation="i1", prefill_timing=PrefillTiming(base_s=0.01, per_token_s=0.001), **fields)


def known(*workers: WorkerCard, loads: tuple[WorkerLoad, ...] = (), policy: str = "kv_aware", **queues: int) -> Known:
    """`queues`: waiting messages by subject, with `__` for dots."""
    return Known(
        now_ms=NOW_MS,
        cards={worker.worker: worker for worker in workers},
        loads={f"{one.worker}-i1": one for one in loads},
        queues={name.replace("__", ".").replace("ANY", "*"): QueueCount(waiting, 0) for name, waiting in queues.items()},
        routers=(SeenRouter("router-1", policy),),
    )


def ended(number: int, ago_s: float = 10.0, **fields: Any) -> RequestEnded:
    """One that took no time, unless `stages` says how many milliseconds each moment came after the one before it."""
    steps: dict[Any, float] = fields.pop("stages", {})
    at = NOW_MS - ago_s * 1e3 - sum(steps.values())
    times: dict[Any, float] = {"received": at}
    for moment, step_ms in steps.items():
        at += step_ms
        times[moment] = at
    whole = {"prompt_tokens": 1000, "completion_tokens": 11, "outcome": "finished", "ended_ms": int(NOW_MS - ago_s * 1e3), **fields}
    return RequestEnded(id=f"r{number}", model="m", gateway="g", times_ms=times, **whole)


def way(
    queue: float = 1, prefill: float = 50, handoff: float = 1, transfer: float = 5, step: float = 10, rest: float = 100
) -> dict[Any, float]:
    return {
        "submitted": 1, "taken": queue, "routed": 1, "prefill_taken": queue, "prefilled": prefill, "first_token": 0, "claimed": handoff,
        "pulled": transfer, "second_token": step, "ended": rest,
    }  # fmt: skip


def history(*events: RequestEnded) -> History:
    made = History()
    for event in events:
        made.add(event)
    return made
