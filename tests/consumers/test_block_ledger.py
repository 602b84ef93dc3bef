"""Only what fits is claimed, and what waits gets its blocks."""

import asyncio

import pytest

from jetwake.consumers.block_ledger import BlockLedger
from jetwake.schemas.errors import EngineRefused, NoRoom


async def test_room_shrinks_by_what_is_promised_and_comes_back() -> None:
    ledger = BlockLedger(100)
    async with ledger.reserve(30):
        assert ledger.claimable() == 2
        async with ledger.reserve(30):
            assert ledger.claimable() == 1
    assert ledger.claimable() == 3


async def test_one_that_does_not_fit_waits_and_nothing_more_is_claimed_meanwhile() -> None:
    ledger, order = BlockLedger(100), list[str]()

    async def second() -> None:
        async with ledger.reserve(60):
            order.append("second")

    async with asyncio.TaskGroup() as tasks, ledger.reserve(50):
        tasks.create_task(second())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert ledger.claimable() == 0
        order.append("first leaves")
    assert order == ["first leaves", "second"]
    assert ledger.claimable() == 1


async def test_a_waiting_one_that_is_cancelled_leaves_nothing_behind() -> None:
    ledger = BlockLedger(10)
    async with ledger.reserve(10):
        waiting = asyncio.create_task(_hold(ledger, 5))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    assert ledger.claimable() == 1


async def test_what_can_never_fit_is_refused_with_both_numbers() -> None:
    with pytest.raises(EngineRefused, match=r"11.*10"):
        await _hold(BlockLedger(10), 11)


async def _hold(ledger: BlockLedger, need_blocks: int) -> None:
    async with ledger.reserve(need_blocks):
        pass


async def test_waiting_for_room_has_a_limit_and_leaves_nothing_behind() -> None:
    ledger = BlockLedger(10, wait_limit_s=0.01)
    async with ledger.reserve(10):
        with pytest.raises(NoRoom, match=r"5 KV blocks within 0\.01 s"):
            async with ledger.reserve(5):
                raise AssertionError("there is no room")
        assert (ledger.promised_blocks(), ledger.claimable()) == (10, 0)
    assert (ledger.promised_blocks(), ledger.claimable()) == (0, 1)
