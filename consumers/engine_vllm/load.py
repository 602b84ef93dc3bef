"""How busy the engine is, from the record vLLM makes of every step.

An engine without work makes no records: then the last one stays true, and its age says nothing.
"""

import time
from typing import TYPE_CHECKING, Any

from vllm.v1.metrics.loggers import StatLoggerBase

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats


class LoadRecord(StatLoggerBase):
    """The last step's figures, kept by the engine that made this object."""

    def __init__(self, vllm_config: "VllmConfig | None" = None, engine_index: int = 0) -> None:
        self.running_requests = 0
        self.waiting_requests = 0
        self.cache_usage = 0.0
        self.preemptions = 0
        self.recorded_at_s = time.monotonic()

    def factory(self, vllm_config: "VllmConfig", engine_index: int = 0) -> "LoadRecord":
        """vLLM wants to make its loggers itself; this one is made already."""
        return self

    def record(
        self,
        scheduler_stats: "SchedulerStats | None",
        iteration_stats: "IterationStats | None",
        mm_cache_stats: "MultiModalCacheStats | None" = None,
        engine_idx: int = 0,
        **_: Any,
    ) -> None:
        self.recorded_at_s = time.monotonic()
        if iteration_stats is not None:
            self.preemptions += iteration_stats.num_preempted_reqs
        if scheduler_stats is not None:
            self.running_requests = scheduler_stats.num_running_reqs
            self.waiting_requests = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            self.cache_usage = scheduler_stats.kv_cache_usage

    def log_engine_initialized(self) -> None:
        """Nothing to say."""
