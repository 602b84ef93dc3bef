"""Whether a decode worker's transfers work at all: an engine can live and make progress while every pull of it fails. Pure."""

from collections.abc import Set
from dataclasses import dataclass, field

PULLS_IN_A_ROW = 5
"""So many failed pulls, and none between them that went well, are no bad luck."""


@dataclass
class PullHealth:
    """`broken` stays: only a new process can mend it."""

    broken: bool = False
    _failed_from: list[str] = field(default_factory=list[str])

    def went_well(self) -> None:
        self._failed_from.clear()

    def failed(self, lane: str, lanes: Set[str]) -> None:
        """`lane`: the prefill worker of that handoff. `lanes`: all there are. Failures from one of several are that one's fault."""
        self._failed_from.append(lane)
        if len(self._failed_from) >= PULLS_IN_A_ROW and (len(set(self._failed_from)) > 1 or not lanes - {lane}):
            self.broken = True
