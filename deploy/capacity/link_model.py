"""What `jetwake probe` measured, as links of a replay: one for pairs inside a topology domain, one for pairs between two. Pure but for its file."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...schemas.codec import first_complaint
from ...schemas.errors import SetupError
from .grid import LinkOptions

GB = 1e9


class MeasuredPair(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    prefill: str
    decode: str
    prefill_domain: str = ""
    decode_domain: str = ""
    gbytes_per_s: float = Field(gt=0)
    latency_ms: float = Field(ge=0)


class LinkModel(BaseModel):
    """A file that `jetwake probe --save` wrote."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["jetwake links"] = "jetwake links"
    pairs: list[MeasuredPair] = Field(min_length=1)

    def options(self) -> LinkOptions:
        """Medians: one slow pair is to be mended, and not to be planned with. The latency is that of all pairs."""
        within = [pair.gbytes_per_s for pair in self.pairs if pair.prefill_domain == pair.decode_domain]
        between = [pair.gbytes_per_s for pair in self.pairs if pair.prefill_domain != pair.decode_domain]
        domains = {domain for pair in self.pairs for domain in (pair.prefill_domain, pair.decode_domain)}
        return LinkOptions(
            gbytes_per_s=median(within or between),
            between_gbytes_per_s=median(between) if between else 0.0,
            latency_ms=median(pair.latency_ms for pair in self.pairs),
            domains=len(domains),
        )


def fitted(sizes_bytes: Sequence[int], took_s: Sequence[float]) -> tuple[float, float]:
    """Bytes a second and seconds before the first: the straight line of least squares through what was measured."""
    mean_bytes, mean_s = sum(sizes_bytes) / len(sizes_bytes), sum(took_s) / len(took_s)
    spread = sum((size - mean_bytes) ** 2 for size in sizes_bytes)
    slope = sum((size - mean_bytes) * (took - mean_s) for size, took in zip(sizes_bytes, took_s, strict=True)) / spread
    slope = max(slope, 1e-15)
    return 1 / slope, max(0.0, mean_s - slope * mean_bytes)


def write_link_model(path: Path, pairs: Sequence[MeasuredPair]) -> None:
    """Raises SetupError."""
    if not pairs:
        raise SetupError(f"no pair was measured: nothing to write to {path}")
    try:
        path.write_text(LinkModel(pairs=list(pairs)).model_dump_json(indent=1) + "\n")
    except OSError as error:
        raise SetupError(f"{path} cannot be written: {error.strerror}") from error


def read_link_model(path: Path) -> LinkModel:
    """Raises SetupError."""
    try:
        return LinkModel.model_validate_json(path.read_text())
    except OSError as error:
        raise SetupError(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise SetupError(f"{path} is no file that `jetwake probe --save` wrote: {first_complaint(error)}") from error
