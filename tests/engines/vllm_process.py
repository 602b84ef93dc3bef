"""A worker in miniature, for tests that kill it: starts an engine, prints the ids of its processes, and waits.

python vllm_process.py MODEL
"""

import asyncio
import sys

from jetwake.consumers.engine_vllm.engine import VllmEngine
from jetwake.consumers.engine_vllm.settings import VllmSettings


async def main(model: str) -> None:
    engine = VllmEngine(VllmSettings(model=model, max_model_len=512, max_num_seqs=4))
    await engine.start()
    print("PIDS", *(process.pid for process in engine.processes.alive()), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
