"""A worker that says what a test wants it to, in chunks as the test cuts them. No engine: tokens on the reply subject, then the end."""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from jetwake.pipeline.catalogue import ModelCatalogue
from jetwake.pipeline.checkpoints import checkpoint
from jetwake.pipeline.clock import ServerClock
from jetwake.pipeline.connection import Bus
from jetwake.pipeline.publish import Publisher
from jetwake.pipeline.raw import RawMessage
from jetwake.pipeline.settings import BrokerSettings, TopologySettings
from jetwake.pipeline.terminals import Terminals
from jetwake.pipeline.topology import ensure_topology
from jetwake.schemas import subjects
from jetwake.schemas.codec import decode
from jetwake.schemas.replies import Failed, Finished, TokenChunk
from jetwake.schemas.requests import InferenceRequest
from jetwake.schemas.tokens import pack_tokens
from jetwake.schemas.workers import ModelCard


@dataclass
class Script:
    """`sizes`: of chunks, in tokens. After `pause_after` tokens it waits for `go`. `failure`: how it ends."""

    tokens: list[int]
    sizes: list[int]
    pause_after: int = 10**9
    failure: str = ""
    go: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class ScriptedWorker:
    """`scripts`: one for each request, the last one for all that follow."""

    def __init__(self, bus: Bus, model: str) -> None:
        self.scripts: list[Script] = []
        self.http: httpx.AsyncClient | None = None
        self.requests: list[InferenceRequest] = []
        self.cancelled: asyncio.Queue[str] = asyncio.Queue()
        self._bus = bus
        self._model = model
        self._publisher = Publisher(bus)
        self._terminals = Terminals(bus, self._publisher, ServerClock(bus))
        self._running: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        await self._bus.subscribe("jw.requests.>", self._take)
        await self._bus.subscribe(subjects.CANCELS, lambda message: self.cancelled.put_nowait(subjects.last_token(message.subject)))
        await self._bus.flush()

    async def tokens(self, text: str) -> list[int]:
        """As the gateway's own tokenizer has them."""
        assert self.http is not None
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        return (await self.http.post("/tokenize", json=body)).json()["tokens"]

    def _take(self, message: RawMessage) -> None:
        request = decode(message.data, InferenceRequest)
        self.requests.append(request)
        task = asyncio.create_task(self._say(request, self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _say(self, request: InferenceRequest, script: Script) -> None:
        subject = subjects.reply(request.gateway, request.request_id)
        offset = 0
        for size in _sizes(script.sizes, len(script.tokens)):
            if offset >= script.pause_after:
                await script.go.wait()
            chunk = TokenChunk(
                request_id=request.request_id,
                attempt=1,
                offset=offset,
                tokens=pack_tokens(script.tokens[offset : offset + size]),
                cached_tokens=0 if offset == 0 else None,
            )
            await self._publisher.send(subject, chunk)
            offset += size
            await checkpoint(self._publisher, request, pack_tokens(script.tokens[:offset]))
        ending = {"request_id": request.request_id, "model": request.model, "attempt": 1, "tokens": pack_tokens(script.tokens)}
        failed = Failed(**ending, code="engine_dead", text=script.failure) if script.failure else None
        await self._terminals.end(request, failed or Finished(**ending, finish_reason="stop"))
        script.ended.set()


@asynccontextmanager
async def scripted_model(url: str, model: str, source: Path) -> AsyncGenerator[ScriptedWorker]:
    """Yields when a gateway can be started for it."""
    async with Bus.connect(BrokerSettings(url=url), name="worker") as bus:
        await ensure_topology(bus, TopologySettings())
        card = ModelCard(model=model, source=str(source), vocabulary_size=2048, max_model_len_tokens=4096, block_size_tokens=16)
        await ModelCatalogue(bus, Publisher(bus)).put(card)
        worker = ScriptedWorker(bus, model)
        await worker.start()
        yield worker


def _sizes(wanted: Iterable[int], total: int) -> Iterable[int]:
    """These sizes as far as they go, then what is left at once."""
    left = total
    for size in wanted:
        if left:
            yield min(size, left)
            left -= min(size, left)
    if left:
        yield left
