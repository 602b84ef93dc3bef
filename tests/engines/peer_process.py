"""Run as a program: a prefill engine in a process of its own, for tests that kill or freeze it.

Prints one line of JSON with its address, then for each line `<number of tokens> <salt>` on standard input one with the handoff.
"""

import asyncio
import json
import sys

from jetwake.consumers.engine import Leg
from jetwake.consumers.engine_simulated import SimulatedEngine, SimulatedSettings
from jetwake.schemas.requests import Sampling
from jetwake.schemas.tokens import pack_tokens


def prompt(length: int, salt: int) -> bytes:
    return pack_tokens((7 * i + salt) % 1000 for i in range(length))


async def main() -> None:
    engine = SimulatedEngine(SimulatedSettings.model_validate_json(sys.argv[1]))
    info = await engine.start()
    print(json.dumps([info.engine_id, info.side_channel_host, info.side_channel_port]), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        length, salt = (int(word) for word in line.split())
        done = await engine.prefill(Leg(f"{length}-{salt}", prompt(length, salt), Sampling(temperature=0.0)))
        assert done.kv is not None
        print(json.dumps([done.first_tokens.hex(), done.kv.model_dump_json()]), flush=True)
    await engine.stop()


if __name__ == "__main__":
    asyncio.run(main())
