"""What a replay runs: workers, policy, engine limits, timing and links."""

from dataclasses import dataclass, field
from typing import Any

from ...consumers.timing import DYNAMO_DEFAULT, Timing
from ...producers.policies import POLICIES, KvAwareKnobs
from ...schemas.errors import SetupError
from .replay_links import Link


@dataclass(frozen=True)
class ReplaySettings:
    """Either `aggregated` workers, or `prefill` and `decode` workers. `blocks`: KV blocks of each worker; `decode_blocks`: those of a decode
    worker (0: as many). `event_lag_s`: how long a worker's KV events and load reports are on their way to the router.
    `profile`: the name that `timing` goes by in reports.
    """

    aggregated: int = 0
    prefill: int = 0
    decode: int = 0
    policy: str = "kv_aware"
    knobs: KvAwareKnobs = field(default_factory=KvAwareKnobs)
    block_size_tokens: int = 64
    blocks: int = 16384
    decode_blocks: int = 0
    timing: Timing = DYNAMO_DEFAULT
    profile: str = "dynamo-default"
    max_sequences: int = 256
    max_step_tokens: int = 8192
    event_lag_s: float = 0.0
    link: Link = field(default_factory=Link)
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises SetupError."""
        for name in ("aggregated", "prefill", "decode", "decode_blocks"):
            if getattr(self, name) < 0:
                raise SetupError(f"{name} must be at least 0, not {getattr(self, name)}")
        for name in ("block_size_tokens", "blocks", "max_sequences", "max_step_tokens"):
            if getattr(self, name) < 1:
                raise SetupError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.event_lag_s < 0:
            raise SetupError(f"event_lag_s must be at least 0, not {self.event_lag_s}")
        if self.policy not in POLICIES:
            raise SetupError(f"no routing policy is called {self.policy!r}; there are {', '.join(sorted(POLICIES))}")
        if self.aggregated and (self.prefill or self.decode):
            raise SetupError("either aggregated workers, or prefill and decode workers: not both")
        if not self.aggregated and not (self.prefill and self.decode):
            raise SetupError("there must be at least 1 aggregated worker, or at least 1 prefill and 1 decode worker")

    @property
    def disaggregated(self) -> bool:
        return self.prefill > 0

    @property
    def follows_caches(self) -> bool:
        """Whether the policy looks at what workers have cached: only then are KV events told and the prefix index kept."""
        return self.policy == "kv_aware"

    def described(self) -> dict[str, Any]:
        """For reports: what was run, in plain figures and words."""
        workers: dict[str, Any] = (
            {"prefill": self.prefill, "decode": self.decode} if self.disaggregated else {"aggregated": self.aggregated}
        )
        return {
            "workers": workers,
            "policy": self.policy,
            "block_size": self.block_size_tokens,
            "blocks": self.blocks,
            **({"decode_blocks": self.decode_blocks or self.blocks} if self.disaggregated else {}),
            "profile": self.profile,
            "max_sequences": self.max_sequences,
            "max_step_tokens": self.max_step_tokens,
            "event_lag_s": self.event_lag_s,
            "seed": self.seed,
        }
