"""What is published: the locks name what is pinned, and an environment in which nothing but the wheel is of Jetwake runs all of it."""

import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCKS = ROOT / "deploy" / "requirements"
BY_HAND = {"torch"}
"""In a lock of their own."""
NOT_IN_THE_WHEEL = (
    "deploy/compose/",
    "deploy/docker/",
    "deploy/helm/",
    "deploy/examples/",
    "deploy/collector/",
    "deploy/grafana/",
    "deploy/prometheus/",
)
"""For those who have the source: an installed command reads none of it."""

IMPORT_ALL = """
import importlib, importlib.metadata, pathlib, sys
import jetwake
(home,) = [pathlib.Path(place) for place in jetwake.__path__]
assert home.is_relative_to(sys.prefix), home
for package in sys.argv[1:]:
    importlib.import_module(package)
print(home)
"""


def pins(path: Path) -> dict[str, str]:
    found = re.findall(r"(?m)^([A-Za-z0-9._-]+)==([^\s;\\]+)", path.read_text())
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found}


@pytest.mark.parametrize("name", ["cpu", "dev", "supply"])
def test_the_lock_has_a_hash_of_every_pin(name: str) -> None:
    wanted = {pin: version for pin, version in pins(LOCKS / f"{name}.txt").items() if pin not in BY_HAND}
    lock = LOCKS / f"{name}.lock"
    assert pins(lock) == wanted, "run: make lock"
    check_hashes(lock)


def check_hashes(lock: Path) -> None:
    entries = re.split(r"(?m)^(?=[^\s#])", re.sub(r"(?m)^#.*\n", "", lock.read_text()))
    assert [entry for entry in entries if entry and "--hash=sha256:" not in entry] == []


def test_what_is_locked_by_hand_is_what_is_pinned() -> None:
    pinned = {pin: version for pin, version in pins(LOCKS / "cpu.txt").items() if pin in BY_HAND}
    assert pins(LOCKS / "torch.lock") == pinned, "the hashes of https://download.pytorch.org/whl/cpu/torch/ belong into torch.lock"
    check_hashes(LOCKS / "torch.lock")


def sources() -> list[str]:
    """Every file of the project, also those not committed yet."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("which files belong to the project is told by git alone")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return sorted(name for name in listed.split("\0") if name and (ROOT / name).is_file())


def of_packages(names: list[str]) -> list[str]:
    """What must be in the wheel, as it is in the source."""
    folders = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"].values()
    top = tuple(f"{folder.split('/')[0]}/" for folder in folders)
    return [name for name in names if name.startswith(top) and not name.startswith(NOT_IN_THE_WHEEL) and not name.endswith(".lock")]


def test_an_empty_environment_runs_the_wheel_of_the_sdist(tmp_path: Path) -> None:
    names = sources()
    tree = tmp_path / "tree"
    for name in names:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)
    build = f"from setuptools.build_meta import build_sdist; build_sdist({str(tmp_path)!r})"
    run([sys.executable, "-c", build], tree)
    (sdist,) = tmp_path.glob("jetwake-*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert [name for name in names if not (unpacked / name).is_file() and name not in (".gitignore", ".dockerignore")] == []

    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run(
        [*pip, "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(unpacked)], tmp_path
    )
    (wheel,) = tmp_path.glob("jetwake-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        shipped = {name.removeprefix("jetwake/") for name in archive.namelist() if name.startswith("jetwake/")}
    assert shipped == set(of_packages(names)), "pyproject.toml: packages, package-dir and package-data"

    home = tmp_path / "home"
    run([sys.executable, "-m", "venv", "--without-pip", str(home)], tmp_path)
    python = home / "bin" / "python"
    # The packages that Jetwake needs, but not the `.pth` files beside them: an editable Jetwake would help out unseen.
    inside = Path(run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], tmp_path).strip())
    (inside / "others.pth").write_text(sysconfig.get_path("purelib"))
    run([*pip, "--python", str(python), "install", "--quiet", "--no-deps", "--no-index", "--ignore-installed", str(wheel)], tmp_path)
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    run([str(python), "-c", IMPORT_ALL, *packages], tmp_path)
    assert run([str(home / "bin" / "jetwake"), "--version"], tmp_path).startswith("jetwake 0.")
    assert "decode" in run([str(home / "bin" / "jetwake"), "--help"], tmp_path)
    assert run([str(home / "bin" / "jetwake"), "config", "reference"], tmp_path) == (ROOT / "docs" / "configuration.md").read_text()
    assert '"what": "versions"' in run([str(home / "bin" / "jetwake"), "doctor", "--role", "client", "--json"], tmp_path)


def run(command: list[str], folder: Path) -> str:
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "TMPDIR": str(folder)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout
