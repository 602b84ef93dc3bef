"""Timing profiles by name: how fast a worker is, how many tokens its KV cache holds, and what a token of it weighs on the wire.

`dynamo-default` is a polynomial (see `consumers.timing`). `MODEL@GPU` is a roofline, with more GPUs as `MODEL@GPUx2`. A file that `jetwake profile`
wrote is a fit of a live system. Sources of the figures:

Models, from `config.json` and the model card of each: https://huggingface.co/Qwen/Qwen3-32B (64 layers, hidden 5120, 64 heads, 8 KV
heads of 128; 32.8e9 parameters), https://huggingface.co/Qwen/Qwen3-8B (36 layers, hidden 4096, 32 and 8 heads; 8.2e9),
https://huggingface.co/meta-llama/Llama-3.1-8B (32 layers, hidden 4096, 32 and 8 heads; 8.03e9). The `-fp8` variants have the layers' weights in
8 bits and the KV cache in 16.

GPUs, from NVIDIA's data sheets, SXM variants, tensor figures without sparsity: H100 80 GB, 3.35 TB/s, 989 TFLOP/s bf16, 1979 fp8; H200 141 GB,
4.8 TB/s, the same arithmetic (https://www.nvidia.com/en-us/data-center/h100/ and .../h200/). Both: NVLink 900 GB/s, half in each direction, and in
an HGX or DGX node one 400 Gb/s network port for each GPU. CUDA reports 79.1 and 139.8 GiB of memory.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path

from ...consumers.roofline import Gpu, ModelShape, RooflineTiming
from ...consumers.timing import TIMING_NAMES, ScaledTiming, Timing, timing_named
from ...schemas.errors import SetupError

GIB = 2**30

MODELS = {
    "qwen3-32b": ModelShape(32_762_123_264, 64, 5120, 64, 8, 128, 151_936),
    "qwen3-8b": ModelShape(8_190_735_360, 36, 4096, 32, 8, 128, 151_936),
    "llama-3.1-8b": ModelShape(8_030_261_248, 32, 4096, 32, 8, 128, 128_256),
}
GPUS = {
    "h100": Gpu(int(79.1 * GIB), 3.35e12, 989.4e12, 1978.9e12, 450e9, 50e9),
    "h200": Gpu(int(139.8 * GIB), 4.8e12, 989.4e12, 1978.9e12, 450e9, 50e9),
}
DTYPES = {"": "bf16", "-fp8": "fp8"}

_ROOFLINE_NAME = re.compile(rf"({'|'.join(map(re.escape, MODELS))})(-fp8)?@({'|'.join(GPUS)})(?:x(\d+))?")


@dataclass(frozen=True)
class Profile:
    """`kv_capacity_tokens` of one worker and `kv_bytes_per_token` are 0 where the profile does not know them; `link_bytes_per_s`: of the
    network that KV caches travel over from worker to worker, 0 likewise.
    """

    name: str
    timing: Timing
    kv_capacity_tokens: int = 0
    kv_bytes_per_token: int = 0
    link_bytes_per_s: float = 0.0
    gpus_per_worker: int = 1

    def blocks(self, block_size_tokens: int) -> int:
        """What `--blocks auto` means. Raises SetupError."""
        blocks = self.kv_capacity_tokens // block_size_tokens
        if not blocks:
            raise SetupError(f"profile {self.name} does not know how many KV blocks fit: give --blocks a number")
        return blocks

    def at_speed(self, speed: float) -> "Profile":
        """Raises SetupError."""
        if speed <= 0:
            raise SetupError(f"the speed of a profile must be above 0, not {speed}")
        return self if speed == 1 else replace(self, timing=ScaledTiming(self.timing, speed))


def profile_named(name: str) -> Profile:
    """A name (see the module), or a file. Raises SetupError."""
    if name in TIMING_NAMES:
        return Profile(name, timing_named(name))
    if match := _ROOFLINE_NAME.fullmatch(name):
        model, suffix, gpu, count = match.groups()
        return roofline_profile(name, MODELS[model], GPUS[gpu], DTYPES[suffix or ""], int(count or 1))
    if Path(name).is_file():
        from .profile_file import read_profile

        return read_profile(Path(name))
    raise SetupError(
        f"no profile and no file is called {name!r}; there are: {', '.join(profile_names())}; more GPUs for a worker: …x2, …x4"
    )


def profile_names() -> list[str]:
    return [*TIMING_NAMES, *(f"{model}{suffix}@{gpu}" for model in MODELS for suffix in DTYPES for gpu in GPUS)]


def roofline_profile(name: str, model: ModelShape, gpu: Gpu, dtype: str, gpus_per_worker: int) -> Profile:
    """Raises SetupError for a model that does not fit."""
    timing = RooflineTiming(model, gpu, dtype, tensor_parallel=gpus_per_worker)
    return Profile(
        name=name,
        timing=timing,
        kv_capacity_tokens=timing.kv_capacity_tokens(),
        kv_bytes_per_token=timing.kv_bytes_per_token,
        link_bytes_per_s=gpu.network_bytes_per_s * gpus_per_worker,
        gpus_per_worker=gpus_per_worker,
    )
