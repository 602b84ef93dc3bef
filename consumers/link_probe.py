"""Measures the way between two workers by real transfers, with an agent and a buffer of its own beside the engine's.

Answers `jw.probe.<worker>`. Promises: the engine's own agent and cache are not touched; nothing is done while there is work in hand unless
it is forced; one probe at a time has a buffer here; the buffer goes with the end of the probe, or a minute after it was asked for.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from ..pipeline.connection import Bus, RawMessage
from ..schemas import subjects
from ..schemas.codec import decode, encode
from ..schemas.errors import BrokerUnavailable, PullFailed, SetupError, Undecodable
from ..schemas.link_probe import LinkProbe, LinkProbed, SizePulled
from ..schemas.workers import WorkerCard
from .kv_transfer_nixl import KvTransfer, Pull

log = logging.getLogger(__name__)

BLOCK_BYTES = 64 << 10
NUM_BLOCKS = 256
SIZES_BLOCKS = (1, 4, 16, 64, 256)
REPEATS = 5
BUDGET_S = 5.0
"""A slow link is read less often, but at least once for each size."""
CONNECT_TIMEOUT_S = 5.0
PULL_TIMEOUT_S = 20.0
LIFE_S = 60.0
LOOK_EVERY_S = 0.00005


class LinkProbes:
    """`in_hand` counts the requests that this worker works on."""

    def __init__(self, bus: Bus, card: WorkerCard, in_hand: Callable[[], int]) -> None:
        self._bus = bus
        self._card = card
        self._in_hand = in_hand
        self._questions: asyncio.Queue[tuple[LinkProbe, str]] = asyncio.Queue()
        self._laid_out: KvTransfer | None = None
        self._probe = ""
        self._until_s = 0.0

    async def listen(self) -> None:
        await self._bus.subscribe(subjects.probe(self._card.worker), self._on_question)

    async def run(self) -> None:
        """Answers one question after the other, until cancelled."""
        try:
            while True:
                try:
                    async with asyncio.timeout(max(0.0, self._until_s - time.monotonic()) if self._laid_out else None):
                        question, reply = await self._questions.get()
                except TimeoutError:
                    log.warning("the probe %s was left open: its buffer is freed", self._probe)
                    await self._free()
                    continue
                answer = await self._answer(question)
                with suppress(BrokerUnavailable):  # who asked gives up, and what was laid out for it is freed
                    await self._bus.publish(reply, encode(answer))
        finally:
            await self._free()

    def _on_question(self, message: RawMessage) -> None:
        try:
            question = decode(message.data, LinkProbe)
        except Undecodable as error:
            log.warning("a question about a link that cannot be read: %s", error)
            return
        if message.reply:
            self._questions.put_nowait((question, message.reply))

    async def _answer(self, question: LinkProbe) -> LinkProbed:
        if question.step == "close":
            if question.probe == self._probe:
                await self._free()
            return self._say()
        if (in_hand := self._in_hand()) and not question.force:
            return self._say(refused=f"busy: {in_hand} requests in hand")
        return await (self._lay_out(question) if question.step == "open" else self._measure(question))

    async def _lay_out(self, question: LinkProbe) -> LinkProbed:
        if self._laid_out is not None and self._probe != question.probe:
            return self._say(refused="another probe is under way")
        await self._free()
        engine_id, transfer = new_transfer()
        transfer.arena[:] = pattern_of(question.pattern)
        try:
            port = await transfer.start(self._card.side_channel_host, 0)
        except SetupError as error:
            return self._say(refused=str(error))
        self._laid_out, self._probe, self._until_s = transfer, question.probe, time.monotonic() + LIFE_S
        return self._say(host=self._card.side_channel_host, port=port, engine_id=engine_id)

    async def _measure(self, question: LinkProbe) -> LinkProbed:
        _, transfer = new_transfer()
        try:
            await transfer.start(self._card.side_channel_host, 0)
        except SetupError as error:
            return self._say(refused=str(error))
        try:
            began_s = time.perf_counter()
            await transfer.connect(question.host, question.port, question.engine_id, CONNECT_TIMEOUT_S)
            connect_us = round((time.perf_counter() - began_s) * 1e6)
            sizes = await asyncio.to_thread(_pull_all, transfer, question.engine_id)
            if not np.array_equal(transfer.arena, pattern_of(question.pattern)):
                return self._say(broken="bytes arrived that are not those that were sent")
            return self._say(connect_us=connect_us, sizes=sizes)
        except PullFailed as error:
            return self._say(broken=str(error))
        finally:
            await transfer.stop()

    async def _free(self) -> None:
        transfer, self._laid_out, self._probe = self._laid_out, None, ""
        if transfer is not None:
            await transfer.stop()

    def _say(self, **facts: object) -> LinkProbed:
        return LinkProbed.model_validate({"worker": self._card.worker, **facts})


def new_transfer() -> tuple[str, KvTransfer]:
    engine_id = f"probe-{secrets.token_hex(8)}"
    return engine_id, KvTransfer(engine_id, NUM_BLOCKS, BLOCK_BYTES)


def pattern_of(seed: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint64]]:
    """Every word differs from its neighbours and from the same word under another seed."""
    words = np.arange(NUM_BLOCKS * BLOCK_BYTES // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    return words.reshape(NUM_BLOCKS, BLOCK_BYTES // 8)


def _pull_all(transfer: KvTransfer, engine_id: str) -> list[SizePulled]:
    """In a thread, which looks more often than an event loop with other work could. Raises PullFailed."""
    _pull_once(transfer, engine_id, 1)  # the first one makes the connection
    until_s = time.perf_counter() + BUDGET_S
    took_us: dict[int, list[int]] = {blocks: [] for blocks in SIZES_BLOCKS}
    for repeat in range(REPEATS):
        for blocks in SIZES_BLOCKS:
            if not repeat or time.perf_counter() < until_s:
                took_us[blocks].append(_pull_once(transfer, engine_id, blocks))
    return [SizePulled(size_bytes=blocks * BLOCK_BYTES, took_us=took) for blocks, took in took_us.items()]


def _pull_once(transfer: KvTransfer, engine_id: str, blocks: int) -> int:
    places = range(blocks)
    began_s = time.perf_counter()
    pull: Pull = transfer.post(engine_id, places, places, b"")
    while not pull.poll():
        if time.perf_counter() - began_s > PULL_TIMEOUT_S:
            raise PullFailed(f"{blocks * BLOCK_BYTES} bytes did not arrive within {PULL_TIMEOUT_S:g} s")
        time.sleep(LOOK_EVERY_S)
    if pull.error:
        raise PullFailed(f"NIXL could not move the bytes: {pull.error}")
    return max(1, round((time.perf_counter() - began_s) * 1e6))
