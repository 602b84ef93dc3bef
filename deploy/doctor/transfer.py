"""A small real NIXL transfer between two agents, in a process of its own: what breaks in UCX breaks by a crash or a hang.

`python -m jetwake.deploy.doctor.transfer` prints one JSON object; `nixl_transfer` starts it and judges what it says.
"""

import asyncio
import json
import subprocess
import sys
import time
from typing import Any

from ...schemas.errors import JetwakeError, SetupError
from .finding import Finding

BLOCKS, BLOCK_BYTES = 64, 64 << 10
TIMEOUT_S = 30.0
WHAT = "NIXL"
_CURE = "read the words above; `UCX_TLS=tcp,shm,self` takes only what every machine has, and an unset UCX_* takes UCX's own choice"


def nixl_transfer() -> Finding:
    try:
        done = subprocess.run([sys.executable, "-m", __name__], capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return Finding(WHAT, "wrong", f"4 MiB did not arrive within {TIMEOUT_S:g} s", _CURE)
    try:
        facts = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        words = (done.stderr.strip().splitlines() or ["no word"])[-1]
        return Finding(WHAT, "wrong", f"its process ended with code {done.returncode}: {words}", _CURE)
    if "missing" in facts:
        return Finding(WHAT, "wrong", facts["missing"], 'pip install "jetwake[simulated]" (CPU) or "jetwake[gpu]"')
    if "error" in facts:
        words = [line.partition("] ")[2] for line in done.stderr.splitlines() if "ailed" in line]
        return Finding(WHAT, "wrong", "; ".join([facts["error"], *words[:1]]), _CURE)
    backends = ", ".join(facts["backends"])
    return Finding(
        WHAT, "ok", f"{facts['version']}; 4 MiB moved by UCX in {facts['ms']:.1f} ms, every byte as it was; backends: {backends}"
    )


async def _transfer() -> dict[str, Any]:
    import importlib.metadata

    from ...consumers.kv_transfer_nixl import KvTransfer, backends

    giver, taker = KvTransfer("doctor-a", BLOCKS, BLOCK_BYTES), KvTransfer("doctor-b", BLOCKS, BLOCK_BYTES)
    try:
        port = await giver.start("127.0.0.1", 0)
        await taker.start("127.0.0.1", 0)
        for block in range(BLOCKS):
            giver.arena[block] = block * 7919 + 1
        await taker.connect("127.0.0.1", port, "doctor-a", 10.0)
        everything = list(range(BLOCKS))
        await taker.post("doctor-a", everything[:1], everything[:1], b"").wait(10.0)  # the first one makes the connection
        began_s = time.perf_counter()
        await taker.post("doctor-a", everything, everything, b"").wait(10.0)
        took_s = time.perf_counter() - began_s
        if not (taker.arena == giver.arena).all():
            return {"error": "bytes arrived that are not those that were sent"}
        return {"version": importlib.metadata.version("nixl"), "ms": took_s * 1e3, "backends": backends()}
    except SetupError as error:
        return {"missing" if "not installed" in str(error) else "error": str(error)}
    except JetwakeError as error:
        return {"error": str(error)}
    finally:
        await taker.stop()
        await giver.stop()


if __name__ == "__main__":
    print(json.dumps(asyncio.run(_transfer())))
