"""Real vLLM engines for tests: a pair for the whole run, on a tiny model with wide margins between its logits.

Starting one takes tens of seconds, so nothing here is made per test but what a test must break.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

import pytest

from jetwake.consumers.engine import EngineInfo
from jetwake.consumers.engine_vllm.engine import VllmEngine
from jetwake.consumers.engine_vllm.settings import VllmSettings
from jetwake.deploy.demo_model import fetch

from .conformance import Pair

START_TIMEOUT_S = 600


def settings_for(model: Path, **changes: object) -> VllmSettings:
    settings = VllmSettings(model=str(model), served_name="tiny", max_model_len=8192, max_num_seqs=32, engine_args={"seed": 0})
    return VllmSettings.model_validate(settings.model_dump() | changes)


async def start(*engines: VllmEngine) -> list[EngineInfo]:
    """At once, but each begins when the one before has spawned its processes: they hand on the environment."""
    starting: list[asyncio.Task[EngineInfo]] = []
    for engine in engines:
        starting.append(asyncio.create_task(engine.start()))
        while not engine.processes.spawned and not starting[-1].done():
            await asyncio.sleep(0.05)
    return list(await asyncio.gather(*starting))


async def stop(*engines: VllmEngine) -> None:
    await asyncio.gather(*(engine.stop() for engine in engines))


def as_pair(prefill: VllmEngine, decode: VllmEngine, infos: list[EngineInfo]) -> Pair:
    async def forget_prefixes() -> None:
        for engine in (prefill, decode):
            await engine.drain()
            await until_true(engine)

    return Pair(prefill, decode, *infos, forget_prefixes=forget_prefixes, first_token_id=300, num_token_ids=1500)


async def until_true(engine: VllmEngine) -> None:
    """Blocks of a request that just ended are free with the engine's next step."""
    while not await engine.reset_prefix_cache():
        await asyncio.sleep(0.01)


async def started_pair(model: Path, **changes: object) -> Pair:
    engines = VllmEngine(settings_for(model, **changes)), VllmEngine(settings_for(model, **changes))
    try:
        pair = as_pair(*engines, await start(*engines))
        await pair.decode.greet(pair.peer())
    except BaseException:
        await stop(*engines)
        raise
    return pair


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fetch("tiny", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
async def vllm_pair(tiny_model: Path) -> AsyncIterator[Pair]:
    pair = await started_pair(tiny_model)
    yield pair
    await stop_pair(pair)


async def stop_pair(pair: Pair) -> None:
    stopping: list[Awaitable[None]] = [pair.prefill.stop(), pair.decode.stop()]
    await asyncio.gather(*stopping)
