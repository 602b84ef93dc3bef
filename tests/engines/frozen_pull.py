"""Run as a program: pulls from a peer that is frozen, and sees when the blocks of that pull become free. Exits with 0 when all is right."""

import asyncio
import json
import sys
from typing import Any

from jetwake.consumers.engine import Leg, Peer
from jetwake.consumers.engine_simulated import SimulatedEngine, SimulatedSettings
from jetwake.deploy.chaos.freezing import freeze, thaw
from jetwake.schemas.decode import KvReference
from jetwake.schemas.errors import PullFailed
from jetwake.schemas.requests import Sampling
from jetwake.schemas.tokens import pack_tokens

LENGTH = 1000


async def main() -> None:
    peer_process, settings = sys.argv[1:]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, peer_process, settings, stdin=pipe, stdout=pipe)
    try:
        await pull_from_frozen(process, SimulatedSettings.model_validate_json(settings).model_copy(update={"pull_timeout_s": 0.3}))
    finally:
        process.kill()
        await process.wait()


async def pull_from_frozen(process: asyncio.subprocess.Process, settings: SimulatedSettings) -> None:
    engine = SimulatedEngine(settings)
    await engine.start()
    assert process.stdin
    assert process.stdout
    peer = Peer(*json.loads(await process.stdout.readline()))
    for salt in (1, 2):
        process.stdin.write(f"{LENGTH} {salt}\n".encode())
    answers: list[Any] = [json.loads(await process.stdout.readline()) for _ in range(2)]
    await engine.greet(peer)
    await run(engine, answers[0], 1)
    assert engine.stats().used_blocks == 0
    await freeze(process.pid)
    try:
        await run(engine, answers[1], 2)
        raise AssertionError("a frozen peer was read over TCP")
    except PullFailed as error:
        print(error)
    held_back = engine.stats().used_blocks
    assert held_back == 63, held_back
    thaw(process.pid)
    while engine.stats().used_blocks:
        await asyncio.sleep(0.001)
    await engine.stop()


async def run(engine: SimulatedEngine, answer: Any, salt: int) -> None:
    prompt = pack_tokens((7 * i + salt) % 1000 for i in range(LENGTH))
    kv = KvReference.model_validate_json(answer[1])
    leg = Leg(f"pull-{salt}", prompt, Sampling(temperature=0.0, max_tokens=5), "", "", bytes.fromhex(answer[0]), kv)
    async for _ in engine.generate(leg):
        pass


if __name__ == "__main__":
    asyncio.run(main())
