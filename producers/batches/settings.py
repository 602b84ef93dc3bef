"""How a gateway runs batches."""

from pydantic import BaseModel, ConfigDict, Field

from .lines import BatchLimits

DAY_S = 86_400


class BatchSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    batches_at_once: int = Field(default=4, ge=0, description="that this gateway runs; 0: it takes them in and leaves running to others")
    lines_at_once: int = Field(default=128, ge=1, description="of all batches that this gateway runs, on their way at the same time")
    max_lines: int = Field(default=50_000, ge=1, description="of one batch")
    max_file_bytes: int = Field(default=200 << 20, ge=1024, description="of one uploaded file")
    file_days: float = Field(default=30.0, gt=0.0, le=3650.0, description="how long files are kept that ask for nothing else")

    @property
    def limits(self) -> BatchLimits:
        return BatchLimits(self.max_lines, self.max_file_bytes)

    @property
    def file_life_s(self) -> int:
        return max(1, round(self.file_days * DAY_S))
