"""When a worker's own view says that its cache changed and nobody was told."""

from jetwake.consumers.untold_blocks import UntoldBlocks


def test_a_prefill_of_new_blocks_is_silent_until_events_are_told() -> None:
    blocks = UntoldBlocks(16)
    assert blocks.silent_s(100.0) == 0.0
    blocks.prefilled(17, started_s=1.0, now_s=2.0)
    blocks.prefilled(500, started_s=3.0, now_s=4.0)
    assert blocks.silent_s(12.0) == 10.0
    blocks.told(13.0)
    assert blocks.silent_s(99.0) == 0.0


def test_one_that_falls_silent_later_is_found_too() -> None:
    blocks = UntoldBlocks(16)
    blocks.told(1.0)
    blocks.prefilled(17, started_s=2.0, now_s=3.0)
    assert blocks.silent_s(13.0) == 10.0


def test_events_told_while_it_ran_answer_a_prefill() -> None:
    blocks = UntoldBlocks(16)
    blocks.told(1.5)
    blocks.prefilled(17, started_s=1.0, now_s=2.0)
    assert blocks.silent_s(99.0) == 0.0


def test_a_block_that_may_be_the_last_of_a_cached_prompt_proves_nothing() -> None:
    blocks = UntoldBlocks(16)
    blocks.prefilled(16, started_s=1.0, now_s=2.0)
    assert blocks.silent_s(99.0) == 0.0
