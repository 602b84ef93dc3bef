"""Real vLLM engines for tests: one pair for the whole run, on a tiny model with wide margins between its logits.

Starting an engine takes tens of seconds, so tests share the pair; one that a test stopped or killed is replaced for the next.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from jetwake.consumers.engine import EngineInfo
from jetwake.consumers.engine_vllm.engine import VllmEngine
from jetwake.consumers.engine_vllm.settings import VllmSettings
from jetwake.deploy.demo_model import fetch
from jetwake.schemas.errors import EngineDead

from .conformance import Pair


def settings_for(model: Path, **changes: object) -> VllmSettings:
    usual = {
        "model": str(model),
        "served_name": "tiny",
        "max_model_len": 8192,
        "max_num_seqs": 32,
        "pull_timeout_s": 8.0,
        "kv_lease_s": 10,
        "omp_threads": 1,
    }
    return VllmSettings.model_validate(usual | changes)


class VllmPair:
    def __init__(self, settings: VllmSettings) -> None:
        self._settings = settings
        self._engines: dict[str, tuple[VllmEngine, EngineInfo]] = {}

    async def whole(self) -> Pair:
        """Both engines alive, the decode engine greeted."""
        missing = [role for role in ("prefill", "decode") if not await self._alive(role)]
        started = await start(*(VllmEngine(self._settings) for _ in missing))
        self._engines |= dict(zip(missing, started, strict=True))
        (prefill, prefill_info), (decode, decode_info) = self._engines["prefill"], self._engines["decode"]

        async def forget_prefixes() -> None:
            await asyncio.gather(*(forget(engine) for engine in (prefill, decode)))

        pair = Pair(prefill, decode, prefill_info, decode_info, forget_prefixes, first_token_id=300, num_token_ids=1500)
        await decode.greet(pair.peer())
        return pair

    async def _alive(self, role: str) -> bool:
        if role not in self._engines:
            return False
        try:
            await self._engines[role][0].ping(10.0)
        except EngineDead:
            await self._engines.pop(role)[0].stop()
            return False
        return True

    async def stop(self) -> None:
        await asyncio.gather(*(engine.stop() for engine, _ in self._engines.values()))


async def start(*engines: VllmEngine) -> list[tuple[VllmEngine, EngineInfo]]:
    """At once, but each begins when the one before has spawned its processes: they hand on the environment."""
    starting: list[asyncio.Task[EngineInfo]] = []
    for engine in engines:
        starting.append(asyncio.create_task(engine.start()))
        while not engine.processes.spawned and not starting[-1].done():
            await asyncio.sleep(0.05)
    infos = await asyncio.gather(*starting, return_exceptions=True)
    for info in infos:
        if isinstance(info, BaseException):
            await asyncio.gather(*(engine.stop() for engine in engines))
            raise info
    return [(engine, info) for engine, info in zip(engines, infos, strict=True) if isinstance(info, EngineInfo)]


async def forget(engine: VllmEngine) -> None:
    """Blocks of a request that just ended are free with the engine's next step, so ask until they are."""
    await engine.drain()
    while not await engine.reset_prefix_cache():
        await asyncio.sleep(0.01)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fetch("tiny", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
async def vllm_pair(tiny_model: Path) -> AsyncIterator[VllmPair]:
    pair = VllmPair(settings_for(tiny_model))
    yield pair
    await pair.stop()


@pytest.fixture
async def pair(vllm_pair: VllmPair) -> Pair:
    return await vllm_pair.whole()
