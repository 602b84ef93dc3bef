"""The bounds of the queues, from a command line: every part of a system is given the same."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..pipeline.settings import TopologySettings
from .role_settings import built


def topology_settings_of(limits: Sequence[str], configured: Mapping[str, Any] | None = None) -> TopologySettings:
    """`KEY=VALUE` pairs of TopologySettings over what is configured. Raises SetupError naming what is wrong."""
    return built(TopologySettings, "--limit", configured or {}, "--limit", limits)
