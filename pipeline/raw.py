"""A message as it came from the broker, before anybody decodes it. Everything else of this package speaks in these."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

NO_HEADERS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class RawMessage:
    """`status` is empty for a message somebody published, and the number as text for the broker's own remarks."""

    subject: str
    data: bytes
    headers: Mapping[str, str] = field(default_factory=lambda: NO_HEADERS)
    reply: str = ""

    @property
    def status(self) -> str:
        return self.headers.get("Status", "")
