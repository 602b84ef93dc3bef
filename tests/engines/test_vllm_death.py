"""What happens to real vLLM engines when something dies or freezes: no wrong token, no hang, no orphan, no block lost."""

import asyncio
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from jetwake.consumers.engine_vllm.engine import VllmEngine
from jetwake.deploy.chaos.freezing import freeze, thaw
from jetwake.schemas.errors import EngineDead, PullFailed

from .conformance import GREEDY, Pair, apart, collect, handoff, leg, until
from .vllm_engines import pair, tiny_model, vllm_pair  # noqa: F401  (fixtures)

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def workers(engine: object) -> list[psutil.Process]:
    """The processes that run the model."""
    assert isinstance(engine, VllmEngine)
    return [process for process in engine.processes.alive() if "Worker" in process.name()]


async def test_frozen_peer_is_no_answer(pair: Pair) -> None:  # noqa: F811
    """A stopped process answers nothing and closes nothing. When it goes on, the blocks on both sides are freed."""
    prompt = pair.prompt(300, salt=1)
    await apart(pair, pair.prompt(40, salt=2))
    first, kv = await handoff(pair, prompt)
    for worker in workers(pair.prefill):
        await freeze(worker.pid)
    try:
        with pytest.raises(PullFailed, match="no cache after"):
            await collect(pair.decode, leg(prompt, forced=first.first_tokens, kv=kv))
        assert (await collect(pair.decode, leg(pair.prompt(40, salt=3)))).tokens
    finally:
        for worker in workers(pair.prefill):
            thaw(worker.pid)
    await until(lambda: pair.decode.stats().used_blocks == 0)
    await pair.prefill.release([kv.engine_request_id])
    await pair.prefill.drain()


async def test_cancelled_pulls_from_a_dead_peer_lose_no_block(pair: Pair) -> None:  # noqa: F811
    prompts = [pair.prompt(300, salt=10 + i) for i in range(20)]
    handoffs = [await handoff(pair, prompt) for prompt in prompts]
    for worker in workers(pair.prefill):
        await freeze(worker.pid)
    pulls = [
        asyncio.create_task(collect(pair.decode, leg(prompt, forced=first.first_tokens, kv=kv)))
        for prompt, (first, kv) in zip(prompts, handoffs, strict=True)
    ]
    await until(lambda: pair.decode.stats().waiting_requests > 0)
    for worker in workers(pair.prefill):
        worker.kill()
    for pull in pulls:
        pull.cancel()
    await asyncio.gather(*pulls, return_exceptions=True)
    await until(lambda: pair.decode.stats().used_blocks == 0)
    assert (await collect(pair.decode, leg(prompts[0]))).tokens


async def test_dead_process_is_told_to_all(pair: Pair) -> None:  # noqa: F811
    engine = pair.prefill
    outputs = engine.generate(leg(pair.prompt(20), GREEDY.model_copy(update={"max_tokens": 4000})))
    await anext(outputs)
    _, kv = await handoff(pair, pair.prompt(60))
    for worker in workers(engine):
        worker.kill()
    with pytest.raises(EngineDead):
        async for _ in outputs:
            pass
    for call in (engine.held, lambda: engine.release([kv.engine_request_id]), lambda: engine.ping(5.0)):
        with pytest.raises(EngineDead):
            await call()


async def test_frozen_process_does_not_answer_a_ping(pair: Pair) -> None:  # noqa: F811
    for worker in workers(pair.decode):
        await freeze(worker.pid)
    try:
        with pytest.raises(EngineDead, match="did not answer"):
            await pair.decode.ping(0.5)
    finally:
        for worker in workers(pair.decode):
            thaw(worker.pid)
    await pair.decode.ping(30.0)


async def test_no_process_outlives_a_killed_worker(tiny_model: Path) -> None:  # noqa: F811
    script = Path(__file__).with_name("vllm_process.py")
    process = await asyncio.create_subprocess_exec(sys.executable, str(script), str(tiny_model), stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    pids: list[int] = []
    while not pids:
        line = (await process.stdout.readline()).decode()
        assert line, "the engine did not start"
        if line.startswith("PIDS"):
            pids = [int(pid) for pid in line.split()[1:]]
    assert len(pids) == 2
    process.send_signal(signal.SIGKILL)
    await process.wait()
    await asyncio.wait_for(asyncio.to_thread(gone, pids), 10)


def gone(pids: list[int]) -> None:
    for pid in pids:
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.05)
