"""What tests of running fleets share: load without a pause, and the facts they wait for."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import pytest
from fleet import Fleet
from test_dead_workers import all_greeted, registry_of

from jetwake.pipeline import cards, registry
from jetwake.pipeline.connection import Bus
from jetwake.pipeline.settings import BrokerSettings
from jetwake.pipeline.topology import subject_counts
from jetwake.producers.client import Answer, Client
from jetwake.schemas.streams import HANDOFF, PREFILL, REQUESTS

PATIENCE_S = 40


def patient(broker: BrokerSettings) -> BrokerSettings:
    """For whoever only looks: a machine that is busy with many tests answers late."""
    return broker.model_copy(update={"request_timeout_s": 20.0})


def prompt_of(number: int, length: int = 60) -> list[int]:
    return [number % 240, number // 240 % 240, *(i % 240 for i in range(length - 2))]


def cards_live_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a fleet that is all in this process, which may get no turn for seconds: no worker is dead because of that."""
    monkeypatch.setattr(cards, "CARD_TTL_S", 60)
    monkeypatch.setattr(registry, "CARD_TTL_S", 60)


async def until(fact: Callable[[], bool]) -> None:
    """Waits for a fact that nobody announces."""
    async with asyncio.timeout(PATIENCE_S):
        while not fact():
            await asyncio.sleep(0.005)


async def until_held(fleet: Fleet, name: str, count: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while len(await fleet.engines[name].held()) < count:
            await asyncio.sleep(0.01)


async def idle(fleet: Fleet) -> None:
    """Nothing is queued and no block is in use, by the broker's and each engine's own word."""
    async with asyncio.timeout(PATIENCE_S), Bus.connect(patient(fleet.broker), "looker") as bus:
        while any([await subject_counts(bus, stream.name) for stream in (REQUESTS, PREFILL, HANDOFF)]):
            await asyncio.sleep(0.05)
        for engine in fleet.engines.values():
            await engine.drain()
    for name, engine in fleet.engines.items():
        assert engine.stats().used_blocks == 0, name


async def all_ready(fleet: Fleet, workers: int) -> None:
    """So many workers are ready, and those that exchange KV have met."""
    async with registry_of(fleet.broker.url) as registry:
        await registry.wait_for(
            lambda cards: len(cards) == workers and all_greeted(cards) and all(card.state == "ready" for card in cards.values()), PATIENCE_S
        )


class Load:
    """Requests without a pause, until told to stop; every answer is kept, and every error is the test's."""

    def __init__(self, client: Client, at_once: int, max_tokens: int) -> None:
        self._client = client
        self._at_once = at_once
        self._max_tokens = max_tokens
        self._stopping = False
        self._next = 0
        self.answers: list[Answer] = []

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._at_once):
                tasks.create_task(self._ask())
            yield
            self._stopping = True

    async def some_more(self, count: int) -> None:
        wanted = len(self.answers) + count
        await until(lambda: len(self.answers) >= wanted)

    async def _ask(self) -> None:
        while not self._stopping:
            self._next += 1
            answer = await self._client.generate(prompt_of(self._next), max_tokens=self._max_tokens, temperature=0.0)
            assert len(answer.token_ids) == self._max_tokens
            self.answers.append(answer)
