"""Profiles as JSON files: fits that `jetwake profile` writes, and rooflines of other models and GPUs, written by hand.

A roofline file: `{"kind": "roofline", "model": "qwen3-32b" or {"parameters": ..., ...}, "gpu": "h200" or {...}, "dtype": "fp8",
"tensor_parallel": 2}`; the fields of model, GPU and efficiency are those of `consumers.roofline`.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from ...consumers.roofline import Efficiency, Gpu, ModelShape, RooflineTiming
from ...consumers.timing import FittedTiming
from ...schemas.codec import first_complaint
from ...schemas.errors import SetupError
from .profiles import GPUS, MODELS, Profile

_STRICT = ConfigDict(extra="forbid", frozen=True)
NonNegative = Annotated[float, Field(ge=0)]


class FitQuality(BaseModel):
    """`r2`: part of the variance explained; `mape`: mean of |predicted / measured - 1|."""

    model_config = _STRICT
    points: int
    r2: float
    mape: float


class FittedProfile(BaseModel):
    """What `jetwake profile` learned: coefficients of `consumers.timing.FittedTiming`, and how well they fit."""

    model_config = _STRICT
    kind: Literal["fitted"] = "fitted"
    name: str
    measured: str = Field(default="", description="what was measured, in words")
    prefill_step_s: NonNegative
    prefill_token_s: NonNegative
    prefill_pair_s: NonNegative
    decode_step_base_s: NonNegative
    decode_sequence_s: NonNegative
    decode_context_token_s: NonNegative
    kv_capacity_tokens: int = Field(default=0, ge=0)
    kv_bytes_per_token: int = Field(default=0, ge=0)
    prefill_quality: FitQuality | None = None
    decode_quality: FitQuality | None = None

    def timing(self) -> FittedTiming:
        return FittedTiming(**{name: getattr(self, name) for name in FittedTiming.__dataclass_fields__})

    def profile(self) -> Profile:
        return Profile(self.name, self.timing(), self.kv_capacity_tokens, self.kv_bytes_per_token)


class RooflineProfile(BaseModel):
    model_config = _STRICT
    kind: Literal["roofline"]
    name: str = ""
    model: Literal["qwen3-32b", "qwen3-8b", "llama-3.1-8b"] | ModelShape
    gpu: Literal["h100", "h200"] | Gpu
    dtype: Literal["bf16", "fp8"] = "bf16"
    kv_dtype: Literal["bf16", "fp8"] = "bf16"
    tensor_parallel: int = Field(default=1, ge=1)
    efficiency: Efficiency = Efficiency()
    memory_utilization: float = Field(default=0.9, gt=0, le=1)
    reserved_bytes: float = Field(default=3e9, ge=0, description="of each GPU, for activations and CUDA graphs")

    def profile(self) -> Profile:
        """Raises SetupError."""
        model = MODELS[self.model] if isinstance(self.model, str) else self.model
        gpu = GPUS[self.gpu] if isinstance(self.gpu, str) else self.gpu
        timing = RooflineTiming(model, gpu, self.dtype, self.kv_dtype, self.tensor_parallel, self.efficiency)
        return Profile(
            name=self.name,
            timing=timing,
            kv_capacity_tokens=timing.kv_capacity_tokens(self.memory_utilization, self.reserved_bytes),
            kv_bytes_per_token=timing.kv_bytes_per_token,
            link_bytes_per_s=gpu.network_bytes_per_s * self.tensor_parallel,
            gpus_per_worker=self.tensor_parallel,
        )


_FILE: TypeAdapter[FittedProfile | RooflineProfile] = TypeAdapter(Annotated[FittedProfile | RooflineProfile, Field(discriminator="kind")])


def read_profile(path: Path) -> Profile:
    """Raises SetupError."""
    try:
        content = _FILE.validate_json(path.read_bytes())
    except OSError as error:
        raise SetupError(f"profile {path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise SetupError(f"profile {path}: {first_complaint(error)}") from error
    if isinstance(content, RooflineProfile) and not content.name:
        content = content.model_copy(update={"name": path.stem})
    return content.profile()


def write_profile(path: Path, fitted: FittedProfile) -> None:
    """Raises SetupError."""
    try:
        path.write_text(fitted.model_dump_json(indent=2) + "\n")
    except OSError as error:
        raise SetupError(f"profile {path} cannot be written: {error.strerror}") from error
