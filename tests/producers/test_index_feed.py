"""The index equals the worker's cache again after any loss, doubling and reordering of events."""

from hypothesis import given
from hypothesis import strategies as st

from jetwake.producers.index_feed import LaneFollower
from jetwake.producers.prefix_index import PrefixIndex
from jetwake.schemas.blocks import pack_hashes
from jetwake.schemas.kv_events import KvChange, KvEvents, KvSnapshotChunk

LANE = "w-1"


class Worker:
    """What a worker would tell: chains of ten blocks that come and go, leaves first."""

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.number = 0

    def act(self, chain: int, depth: int) -> KvEvents:
        hashes = [chain * 100 + position for position in range(1, 11)]
        wanted, have = hashes[:depth], [block for block in hashes if block in self.held]
        self.number += 1
        if len(wanted) > len(have):
            change = KvChange(kind="stored", hashes=pack_hashes(wanted[len(have) :]))
        else:
            change = KvChange(kind="removed", hashes=pack_hashes(reversed(have[len(wanted) :])))
        self.held = (self.held - set(hashes)) | set(wanted)
        return KvEvents(worker="w", incarnation="1", number=self.number, changes=[change])

    def clear(self) -> KvEvents:
        self.number += 1
        self.held.clear()
        return KvEvents(worker="w", incarnation="1", number=self.number, changes=[KvChange(kind="cleared")])

    def snapshot(self, parts: int) -> list[KvSnapshotChunk]:
        held = sorted(self.held)
        size = -(-len(held) // parts) or 1
        return [
            KvSnapshotChunk(
                worker="w", incarnation="1", number=self.number, index=index, chunks=parts,
                hashes=pack_hashes(held[index * size : (index + 1) * size]),
            )
            for index in range(parts)
        ]  # fmt: skip


def depths(index: PrefixIndex) -> dict[int, int]:
    chains = {chain: [chain * 100 + position for position in range(1, 11)] for chain in range(1, 6)}
    return {chain: index.match(hashes, 0.0).get(LANE, 0) for chain, hashes in chains.items()}


def depths_of(worker: Worker) -> dict[int, int]:
    return {chain: sum(chain * 100 + position in worker.held for position in range(1, 11)) for chain in range(1, 6)}


ACTIONS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 10), st.sampled_from(["pass", "lose", "double", "late", "answer"])), max_size=60
)


@given(ACTIONS, st.integers(1, 4))
def test_any_noise_ends_in_the_truth(actions: list[tuple[int, int, str]], parts: int) -> None:
    worker, index = Worker(), PrefixIndex(10_000)
    follower = LaneFollower(LANE, index)
    late: list[KvEvents] = []
    for chain, depth, fate in actions:
        events = worker.clear() if chain == 0 else worker.act(chain, depth)
        if fate == "late":
            late.append(events)
        elif fate != "lose":
            follower.on_events(events)
        if fate == "double":
            follower.on_events(events)
        if fate == "answer":
            for early in late:
                follower.on_events(early)
            late.clear()
            if follower.wants_snapshot:
                for chunk in reversed(worker.snapshot(parts)):
                    follower.on_chunk(chunk)
    follower.on_events(worker.act(1, 3))  # the noise is over; the next event shows the last gap
    if follower.wants_snapshot:
        for chunk in worker.snapshot(parts):
            follower.on_chunk(chunk)
    assert not follower.wants_snapshot
    assert depths(index) == depths_of(worker)


def test_events_that_come_while_a_snapshot_is_on_its_way_are_applied_after_it() -> None:
    worker, index = Worker(), PrefixIndex(1000)
    follower = LaneFollower(LANE, index)
    follower.on_events(worker.act(1, 5))
    snapshot = worker.snapshot(2)
    follower.on_events(worker.act(2, 4))
    for chunk in snapshot:
        follower.on_chunk(chunk)
    assert depths(index) == depths_of(worker)


def test_a_gap_is_noticed_once() -> None:
    worker, follower = Worker(), LaneFollower(LANE, PrefixIndex(1000))
    for chunk in worker.snapshot(1):
        follower.on_chunk(chunk)
    worker.act(1, 5)
    for _ in range(3):
        follower.on_events(worker.act(2, 4))
    assert follower.gaps == 1
    assert follower.wants_snapshot
