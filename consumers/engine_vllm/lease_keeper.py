"""What runs inside each vLLM worker process for Jetwake: a worker extension, called with `collective_rpc`.

Reads and changes the NIXL connector's own books, which vLLM offers no call for: the blocks kept for peers and their leases, the
handshakes, and what each request pulled. Every method is called between two steps on the thread that owns these books, and with
tensor parallelism on every rank. Times on the wire are seconds from now, never a clock's value.
"""

import os
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, TypedDict


class WorkerFacts(TypedDict):
    """What one rank says about itself."""

    engine_id: str
    pids: list[int]
    kv_bytes_per_block: int
    blocks: int
    kv_layout: str


class Pulled(NamedTuple):
    """By one rank for one request. `transfer_s`: of the longest of its transfers, which run side by side."""

    size_bytes: int
    transfer_s: float
    at_s: float


class LeaseKeeper:
    """Mixed into vLLM's worker class, hence the prefix on every name and no constructor."""

    def jw_facts(self) -> WorkerFacts:
        """Also begins to count pulled bytes, so it is the first call after start."""
        connector = _connector()
        if not hasattr(connector, "jw_pulled"):
            _count_pulls(connector)
        return WorkerFacts(
            engine_id=str(connector.engine_id),
            pids=[os.getppid(), os.getpid()],
            kv_bytes_per_block=sum(connector.block_len_per_layer) * int(connector._physical_blocks_per_logical_kv_block),
            blocks=int(connector._logical_num_blocks),
            kv_layout=str(getattr(connector, "kv_cache_layout", "")),
        )

    def jw_ping(self) -> bool:
        return True

    def jw_outstanding(self, requests: Sequence[str]) -> dict[str, float]:
        """Seconds left for those of these requests whose blocks wait for a peer."""
        connector = _connector()
        now = time.perf_counter()
        left: dict[str, float] = dict.fromkeys(_not_yet_booked(connector, requests), float(connector._lease_extension))
        for request in connector._reqs_to_send.keys() & set(requests):
            left[request] = connector._reqs_to_send[request] - now
        return left

    def jw_extend(self, requests: Sequence[str], lease_s: float) -> list[str]:
        """Returns those whose prefill is not yet booked: ask again."""
        connector = _connector()
        leases: dict[str, float] = connector._reqs_to_send
        deadline = time.perf_counter() + lease_s
        for request in leases.keys() & set(requests):
            leases[request] = max(leases[request], deadline)
        return _not_yet_booked(connector, requests)

    def jw_release(self, requests: Sequence[str]) -> list[str]:
        """Ends the leases; the engine's next step frees the blocks. Returns those whose prefill is not yet booked: ask again."""
        connector = _connector()
        leases: dict[str, float] = connector._reqs_to_send
        for request in leases.keys() & set(requests):
            leases[request] = 0.0
        return _not_yet_booked(connector, requests)

    def jw_names_of(self, leg: str) -> list[str]:
        """The engine's own names of a leg that ran here and may still hold blocks."""
        return [name for name in _connector()._reqs_to_process if _is_leg(name, leg)]

    def jw_handshake(self, engine_id: str, host: str, port: int, tensor_parallel: int) -> str:
        """Starts the handshake in the background, unless it is done or running; answers like `jw_handshake_state`."""
        _connector()._ensure_handshake(engine_id, host, port, tensor_parallel)
        return self.jw_handshake_state(engine_id)

    def jw_handshake_state(self, engine_id: str) -> str:
        connector = _connector()
        with connector._handshake_lock:
            if engine_id in connector._remote_agents:
                return "done"
            return "running" if engine_id in connector._handshake_futures else "failed"

    def jw_forget(self, engine_id: str) -> bool:
        """False while a transfer with that engine still runs, or a handshake: ask again."""
        connector = _connector()
        if engine_id in connector._handshake_futures:
            return False
        if engine_id not in connector._remote_agents:
            return True
        busy = {meta.remote.engine_id for meta in connector._recving_metadata.values() if meta.remote is not None}
        if engine_id in busy:
            return False
        connector._cleanup_remote_engine(engine_id)
        return True

    def jw_pulling(self, request: str) -> bool:
        """Whether this request's pull has begun and not ended (a handshake for it counts)."""
        return any(_is_leg(name, request) for name in _connector()._recving_metadata)

    def jw_pulled(self, request: str) -> tuple[int, float, float]:
        """What this rank read from a peer for the request: bytes, seconds of transfer, seconds since the last of it came.

        Each figure is given once.
        """
        pulled: dict[str, Pulled] = _connector().jw_pulled
        found = [pulled.pop(name) for name in [name for name in pulled if _is_leg(name, request)]]
        last_s = max((each.at_s for each in found), default=0.0)
        ago_s = time.perf_counter() - last_s if found else 0.0
        return sum(each.size_bytes for each in found), max((each.transfer_s for each in found), default=0.0), ago_s


PULLED_KEPT = 4096
"""Figures nobody asked for (aborted requests) are dropped, oldest first, beyond this many."""


def _connector() -> Any:
    """The NIXL connector's worker half. All of it is private to vLLM: this file is where an upgrade has to look."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    # The public base class does not tell of the NIXL implementation behind it.
    group: Any = get_kv_transfer_group()
    return group.connector_worker


def _not_yet_booked(connector: Any, requests: Sequence[str]) -> list[str]:
    """A finished prefill's lease reaches the worker with the engine's next step."""
    return [request for request in requests if request in connector._reqs_to_process and request not in connector._reqs_to_send]


def _is_leg(name: str, request: str) -> bool:
    """vLLM appends a random suffix to the ids that it is given."""
    return name == request or name.rpartition("-")[0] == request


def _count_pulls(connector: Any) -> None:
    """NIXL reports the bytes of each finished transfer; vLLM asks for that while it still knows whose transfer it was."""
    pulled: dict[str, Pulled] = {}
    telemetry = connector.nixl_wrapper.get_xfer_telemetry

    def counting_telemetry(handle: Any) -> Any:
        report = telemetry(handle)
        for request, handles in connector._recving_transfers.items():
            if handle in handles:
                before = pulled.get(request, Pulled(0, 0.0, 0.0))
                transfer_s = max(before.transfer_s, report.xferDuration / 1e6)
                pulled[request] = Pulled(before.size_bytes + int(report.totalBytes), transfer_s, time.perf_counter())
                break
        while len(pulled) > PULLED_KEPT:
            del pulled[next(iter(pulled))]
        return report

    connector.nixl_wrapper.get_xfer_telemetry = counting_telemetry
    connector.jw_pulled = pulled
