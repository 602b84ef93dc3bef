"""Faults that others reported of systems like this one, where no other test shows what becomes of them here."""

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from fleet import Fleet, fleet_of
from operations import PATIENCE_S, idle, patient, prompt_of, until, until_held
from test_dead_workers import SLOW, all_greeted, registry_of, worker_process

from jetwake.consumers.simulated_settings import SimulatedSettings
from jetwake.deploy.chaos.expected import simulated_answer
from jetwake.deploy.nats_server import NatsServer
from jetwake.pipeline.clock import ServerClock, WallClock
from jetwake.pipeline.connection import Bus, RawMessage
from jetwake.pipeline.publish import Publisher
from jetwake.pipeline.replies import ReplyInbox
from jetwake.pipeline.reserved_port import ReservedPort
from jetwake.schemas import subjects
from jetwake.schemas.codec import decode
from jetwake.schemas.decode import KvHandoff
from jetwake.schemas.errors import NoWorker, RequestFailed
from jetwake.schemas.replies import Reply, TokenChunk
from jetwake.schemas.requests import Sampling
from jetwake.schemas.tokens import unpack_tokens

LIMITS = SimulatedSettings(model="sim").limits()
GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0}
TOLERANCE_NS = 500_000_000
"""Between two processes' views of the broker's time on a busy machine."""


def right_answer(prompt: list[int]) -> list[int]:
    return simulated_answer(LIMITS, prompt, Sampling(**GREEDY))


def counter(fleet: Fleet, name: str, which: str) -> int:
    return fleet.engines[name].stats().counters.get(which, 0)


async def test_a_handoff_lives_by_renewed_leases_until_its_hold_is_over_and_is_then_prefilled_again(own_server: NatsServer) -> None:
    """Decode stands still for longer than two leases and the whole hold; when it goes on, all handoffs in its queue are stale."""
    lease_s = 2.0
    worker = {"lease_s": lease_s, "hold_s": 2.5 * lease_s, "stall_limit_s": 300}
    async with fleet_of(own_server.url, prefill=1, decode=1, worker=worker, lease_s=lease_s, slots=2) as (fleet, client):
        before = counter(fleet, "prefill-1", "leases_released")
        fleet.engines["decode-1"].stall()
        submitted = [await client.submit(prompt_of(number), **GREEDY) for number in range(6)]
        await until_held(fleet, "prefill-1", 5)  # one is pulled already, and gets no token
        async with asyncio.timeout(PATIENCE_S):
            while await fleet.engines["prefill-1"].held():
                await asyncio.sleep(0.05)
        assert counter(fleet, "prefill-1", "leases_released") - before == 5
        assert counter(fleet, "prefill-1", "leases_expired") == 0
        fleet.engines["decode-1"].go_on()
        answers = [await each.answer() for each in submitted]
        assert [answer.token_ids for answer in answers] == [right_answer(prompt_of(number)) for number in range(6)]
        assert sum(answer.attempts > 1 for answer in answers) >= 5
        assert counter(fleet, "decode-1", "blocks_wrong") == 0
        await idle(fleet)


async def test_what_was_pulled_is_not_read_when_the_hold_is_over_by_then(own_server: NatsServer) -> None:
    """The engine stands still between the pull and its first token: whether the blocks were whole when they were read, nobody knows."""
    worker = {"hold_s": 2.5, "stall_limit_s": 300}
    async with (
        fleet_of(own_server.url, prefill=1, decode=1, worker=worker) as (fleet, client),
        Bus.connect(patient(fleet.broker), "looker") as bus,
    ):
        clock, handoffs, pulled = ServerClock(bus), list[KvHandoff](), counter(fleet, "decode-1", "pulled_requests")
        await clock.sync()
        await bus.subscribe("jw.handoff.>", lambda raw: handoffs.append(decode(raw.data, KvHandoff)))
        await bus.flush()
        fleet.engines["decode-1"].stall()
        waiting = asyncio.create_task(client.generate(prompt_of(1), **GREEDY))
        await until(lambda: counter(fleet, "decode-1", "pulled_requests") == pulled + 1)
        await until(lambda: clock.now_ns() > handoffs[0].hold_until_ns)
        fleet.engines["decode-1"].go_on()
        answer = await waiting
        assert (answer.token_ids, answer.attempts) == (right_answer(prompt_of(1)), 2)
        assert [handoff.request.attempt for handoff in handoffs] == [1, 2]
        assert counter(fleet, "decode-1", "pulled_requests") == pulled + 2
        await idle(fleet)


async def test_a_handoff_that_somebody_sends_again_ends_nothing_and_gives_no_foreign_token(own_server: NatsServer) -> None:
    """Its blocks belong to other prompts by then."""
    async with (
        fleet_of(own_server.url, prefill=1, decode=2, num_blocks=64) as (fleet, client),
        Bus.connect(patient(fleet.broker), "meddler") as bus,
    ):
        handoffs, replies = list[RawMessage](), list[Any]()
        listening = await bus.subscribe("jw.handoff.>", handoffs.append)
        await bus.subscribe(subjects.replies_of(client.name), lambda raw: replies.append(decode(raw.data, Reply)))  # type: ignore[arg-type]
        await bus.flush()
        prompt = prompt_of(1, 200)
        first = await client.generate(prompt, **GREEDY)
        await until(lambda: len(handoffs) == 1)
        await listening.unsubscribe()
        for number in range(2, 12):
            await client.generate(prompt_of(number, 400), **GREEDY)
        for number in range(8):
            await Publisher(bus).store_bytes(handoffs[0].subject, handoffs[0].data, message_id=f"by-hand-{number}")
        await idle(fleet)
        await bus.flush()
        mine = [reply for reply in replies if reply.request_id == first.request_id]
        assert len([reply for reply in mine if not isinstance(reply, TokenChunk)]) == 1
        expected = right_answer(prompt)
        for chunk in mine:
            if isinstance(chunk, TokenChunk):
                tokens = unpack_tokens(chunk.tokens)
                assert tokens == expected[chunk.offset : chunk.offset + len(tokens)]


async def test_what_decode_refuses_after_a_handoff_leaves_no_block_with_the_prefill_worker(own_server: NatsServer) -> None:
    """The prompt fits, the answer does not. Only one of these prompts fits at a time: each waits for the release of the one before."""
    async with fleet_of(own_server.url, prefill=1, decode=1, num_blocks=100) as (fleet, client):
        for number in range(10):
            with pytest.raises(RequestFailed, match=r"132.*100"):
                await client.generate(prompt_of(number, 95 * 16), max_tokens=37 * 16)
        await until(lambda: fleet.engines["prefill-1"].stats().used_blocks == 0)
        assert counter(fleet, "prefill-1", "leases_released") == 10
        assert counter(fleet, "prefill-1", "leases_expired") == 0


async def test_workers_that_are_not_compatible_exchange_nothing(own_server: NatsServer) -> None:
    """Two halves of a fleet serve one model with KV of another layout each; then one half loses its decode worker."""
    async with fleet_of(own_server.url, prefill=1, decode=1) as (fleet, client), registry_of(own_server.url) as registry:
        fleet.start_worker("prefill", "prefill-2", block_bytes=256)
        fleet.start_worker("decode", "decode-2", block_bytes=256)
        await registry.wait_for(lambda cards: len(cards) == 4 and all(card.peers for card in cards.values() if card.role == "decode"), 90)
        cards = registry.workers
        assert cards["prefill-1"].pool == cards["decode-1"].pool != cards["prefill-2"].pool == cards["decode-2"].pool
        other_weights = cards["prefill-1"].compatibility.model_copy(update={"revision": "other"})
        assert other_weights.digest() != cards["prefill-1"].compatibility.digest()
        answers = await asyncio.gather(*(client.generate(prompt_of(number), **GREEDY) for number in range(40)))
        pairs = Counter((answer.prefill_worker, answer.decode_worker) for answer in answers)
        assert set(pairs) == {("prefill-1", "decode-1"), ("prefill-2", "decode-2")}
        await fleet.stop("decode-2")
        fleet.forget("decode-2")
        answers = await asyncio.gather(*(client.generate(prompt_of(number), **GREEDY) for number in range(40)))
        assert {answer.decode_worker for answer in answers} == {"decode-1"}
        await idle(fleet)


SHIFTED = """import os, time
shift_s = int(os.environ["CLOCK_SHIFT_S"])
for name in ("time", "monotonic"):
    original, original_ns = getattr(time, name), getattr(time, name + "_ns")
    setattr(time, name, lambda original=original: original() + shift_s)
    setattr(time, name + "_ns", lambda original_ns=original_ns: original_ns() + shift_s * 1_000_000_000)
"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("prefill_ahead_s", [3600, -3600])
async def test_clocks_that_differ_by_two_hours_change_no_deadline(
    own_server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefill_ahead_s: int
) -> None:
    """Wall and monotonic clocks of the two workers go an hour before and an hour behind everybody else's."""
    (tmp_path / "sitecustomize.py").write_text(SHIFTED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    async with (
        fleet_of(own_server.url, prefill=1, decode=1) as (fleet, client),
        registry_of(own_server.url) as registry,
        AsyncExitStack() as processes,
    ):
        for role, ahead_s in (("prefill", prefill_ahead_s), ("decode", -prefill_ahead_s)):
            monkeypatch.setenv("CLOCK_SHIFT_S", str(ahead_s))
            started = worker_process(own_server.url, role, f"{role}-x", "sim", tmp_path / role, *SLOW)
            await processes.enter_async_context(started)
        try:
            await registry.wait_for(lambda cards: len(cards) == 4 and all_greeted(cards), 80)
        except NoWorker as error:
            raise AssertionError("\n".join((tmp_path / role).read_text() for role in ("prefill", "decode"))) from error
        for name in ("prefill-1", "decode-1"):
            await fleet.stop(name)
            fleet.forget(name)
        answer = await client.generate(prompt_of(1), timeout_s=20.0, **GREEDY)
        assert (answer.prefill_worker, answer.decode_worker, answer.attempts) == ("prefill-x", "decode-x", 1)
        submitted = await client.submit(prompt_of(2), max_tokens=20_000, timeout_s=2.0)
        async with asyncio.timeout(PATIENCE_S), Bus.connect(patient(fleet.broker), "reader") as bus:
            while (end := await ReplyInbox(bus, "reader", WallClock()).lookup("sim", client.name, submitted.request_id)) is None:
                await asyncio.sleep(0.05)
        assert end.type == "expired"
        assert "decode" in end.phase
        assert client.now_ns() > submitted.request.deadline_ns - TOLERANCE_NS


async def test_another_engine_at_the_same_address_is_met_at_once_and_nobody_else_begins_anew(own_server: NatsServer) -> None:
    """A prefill and a decode worker end in turn, without a drain, and come again with the same name, host and port."""
    reserved = {f"{role}-1": ReservedPort() for role in ("prefill", "decode")}
    ports = {name: each.port for name, each in reserved.items()}
    async with fleet_of(own_server.url, prefill=0, decode=0, aggregated=1) as (fleet, client), registry_of(own_server.url) as registry:
        for name, port in ports.items():
            fleet.start_worker(name.partition("-")[0], name, side_channel_port=port)
        await registry.wait_for(lambda cards: set(ports) <= set(cards) and all_greeted(cards), 90)
        await fleet.stop("aggregated-1")
        fleet.forget("aggregated-1")
        for turn in range(6):
            doomed, other = list(ports)[:: 1 if turn % 2 else -1]
            incarnations = {name: registry.workers[name].incarnation for name in ports}
            assert (await client.generate(prompt_of(turn), **GREEDY)).token_ids == right_answer(prompt_of(turn))
            await fleet.kill(doomed)
            fleet.start_worker(doomed.partition("-")[0], doomed, side_channel_port=ports[doomed])
            answer = await client.generate(prompt_of(100 + turn), **GREEDY)
            assert answer.token_ids == right_answer(prompt_of(100 + turn))
            assert answer.kv_bytes > 0
            assert registry.workers[doomed].incarnation != incarnations[doomed]
            assert registry.workers[other].incarnation == incarnations[other]
    for each in reserved.values():
        each.free()
