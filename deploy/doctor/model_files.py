"""Whether what a worker is told to load is there and whole. Reads names and sizes, not weights."""

import json
from pathlib import Path

from platformdirs import user_cache_dir

from ...schemas.errors import SetupError
from ..demo_model import fetch, is_made
from .finding import Finding

WHAT = "model"


def model_files(name: str) -> Finding:
    if name in ("demo", "tiny"):
        if is_made(name):
            return Finding(WHAT, "ok", f"{name} in {user_cache_dir('jetwake')}")
        return Finding(WHAT, "warning", f"{name} is not made yet", f"jetwake model fetch {name}")
    try:
        folder = fetch(name)
    except SetupError as error:
        return Finding(WHAT, "wrong", str(error), "give a folder, or a name on the hub such as org/model")
    return folder_of_model(folder) if folder.is_dir() else _on_the_hub(name)


def folder_of_model(folder: Path) -> Finding:
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    if "tokenizer.json" in missing and (folder / "tokenizer.model").is_file():
        missing.remove("tokenizer.json")
    index = folder / "model.safetensors.index.json"
    try:
        shards = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else set[str]()
    except (ValueError, KeyError) as error:
        return Finding(WHAT, "wrong", f"{index} cannot be read: {error!r}", "copy the model again")
    missing += sorted(shard for shard in shards if not (folder / shard).is_file())
    weights = [path for pattern in ("*.safetensors", "*.bin", "*.gguf") for path in folder.glob(pattern)]
    if not weights:
        missing.append("weights (*.safetensors)")
    empty = [path.name for path in weights if path.stat().st_size < 1024]
    if missing or empty:
        found = "; ".join(
            [*(f"{name} is missing" for name in missing), *(f"{name} is nearly empty (a git-lfs pointer?)" for name in empty)]
        )
        return Finding(WHAT, "wrong", f"{folder}: {found}", "copy the model again, with all its files")
    return Finding(WHAT, "ok", f"{folder}, {sum(path.stat().st_size for path in weights) / 2**30:.1f} GiB of weights")


def _on_the_hub(name: str) -> Finding:
    from huggingface_hub import try_to_load_from_cache

    there = try_to_load_from_cache(name, "config.json")
    if isinstance(there, str):
        return folder_of_model(Path(there).parent)
    return Finding(WHAT, "warning", f"{name} is not on this machine yet", f"its first start downloads it; before: hf download {name}")
