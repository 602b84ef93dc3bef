"""How busy the engine is, from the record vLLM makes of every step.

An engine without work makes no records: then the last one stays true, and its age says nothing.
"""

import time
from typing import TYPE_CHECKING, Any

from vllm.v1.metrics.loggers import PrometheusStatLogger

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.metrics.stats import IterationStats, SchedulerStats


class LoadRecord(PrometheusStatLogger):
    """The last step's figures.

    It takes the place of vLLM's Prometheus logger and exports nothing: that one costs hundreds of updates a second while blocks are
    held, and registers its names in the process, so that a second engine could not start.
    """

    # The parent's constructor would register those names.
    def __init__(self, vllm_config: "VllmConfig", engine_indexes: list[int] | None = None) -> None:
        self.running_requests = 0
        self.waiting_requests = 0
        self.cache_usage = 0.0
        self.preemptions = 0
        self.recorded_at_s = time.monotonic()

    def record(
        self,
        scheduler_stats: "SchedulerStats | None",
        iteration_stats: "IterationStats | None",
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        self.recorded_at_s = time.monotonic()
        if iteration_stats is not None:
            self.preemptions += iteration_stats.num_preempted_reqs
        if scheduler_stats is not None:
            self.running_requests = scheduler_stats.num_running_reqs
            self.waiting_requests = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            self.cache_usage = scheduler_stats.kv_cache_usage

    def record_admission_rejection(self, reason: str) -> None:
        """Admission is not vLLM's business here."""

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
        """The engine never sleeps."""

    def log_engine_initialized(self) -> None:
        """Nothing to say."""


def load_record(llm: Any) -> LoadRecord:
    """The record that this AsyncLLM made when it was given the class."""
    return next(logger for logger in llm.logger_manager.stat_loggers if isinstance(logger, LoadRecord))
