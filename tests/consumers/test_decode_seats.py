"""How much a decode worker asks for, where, and at which priority."""

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from jetwake.consumers.decode_seats import FAR_BOUNDS, NEAR_BOUNDS, DecodeLoad, far_seats, near_seats, takes_turns
from jetwake.pipeline.fetching import too_little, too_much

LOADS = st.builds(
    DecodeLoad,
    promised_blocks=st.integers(0, 120),
    capacity_blocks=st.integers(1, 100),
    running=st.integers(0, 40),
    slots=st.integers(1, 32),
    next_blocks=st.integers(1, 30),
)


def one_more(load: DecodeLoad, more: int) -> DecodeLoad:
    return replace(load, promised_blocks=load.promised_blocks + more * load.next_blocks, running=load.running + more)


def test_priorities_are_those_that_the_broker_knows_and_near_ones_come_first() -> None:
    idle, full = DecodeLoad(0, 100, 0, 10), DecodeLoad(100, 100, 3, 10)
    assert (idle.near_priority(), full.near_priority()) == (0, len(NEAR_BOUNDS))
    assert (idle.far_priority(), full.far_priority()) == (len(NEAR_BOUNDS) + 1, 9)
    assert full.near_priority() < idle.far_priority() <= 9 == len(NEAR_BOUNDS) + len(FAR_BOUNDS) + 1


def test_what_is_fuller_counts_blocks_or_slots() -> None:
    assert DecodeLoad(50, 100, 1, 10).share() == DecodeLoad(1, 100, 5, 10).share() == 0.5


@given(LOADS, st.integers(0, 4), st.integers(0, 32))
def test_each_seat_has_the_priority_of_the_load_before_it(load: DecodeLoad, arrived: int, count: int) -> None:
    expected = Counter(one_more(load, more).near_priority() for more in range(arrived, arrived + count))
    assert near_seats(load, arrived, count) == expected


@given(LOADS, st.integers(1, 32))
def test_a_seat_that_is_taken_changes_no_other(load: DecodeLoad, count: int) -> None:
    """So that nothing must be asked for anew: what is left at the broker is what is wanted."""
    outstanding = Counter(near_seats(load, 0, count))
    outstanding[min(outstanding)] -= 1
    wanted = near_seats(one_more(load, 1), 0, count - 1)
    assert too_much(+outstanding, wanted) == []
    assert too_little(+outstanding, wanted) == {}


@given(st.integers(0, 40), st.integers(0, 12), st.integers(0, 1000))
def test_other_domains_get_half_of_the_seats_at_most_and_all_of_them_some_in_turn(free: int, domains: int, turn: int) -> None:
    offered = far_seats(free, domains, turn)
    assert sum(offered.values()) <= max(free // 2, 1 if free and domains else 0)
    assert all(0 <= place < domains for place in offered)
    if not takes_turns(free, domains):
        assert offered == far_seats(free, domains, turn + 1)
    if free:
        assert {place for at in range(turn, turn + 16 * max(domains, 1)) for place in far_seats(free, domains, at)} == set(range(domains))


PRIORITIES = st.dictionaries(st.integers(0, 9), st.integers(0, 8), max_size=5)


@given(PRIORITIES, PRIORITIES)
def test_never_more_is_asked_for_than_wanted_and_never_at_a_better_priority(outstanding: dict[int, int], wanted: dict[int, int]) -> None:
    left = {priority: count for priority, count in outstanding.items() if priority not in too_much(outstanding, wanted)}
    more = too_little(left, wanted)
    asked = Counter(left) + Counter(more)
    free = sum(wanted.values())
    assert asked.total() <= free
    if free:
        first = min(priority for priority, count in wanted.items() if count)
        assert min(asked) == first
