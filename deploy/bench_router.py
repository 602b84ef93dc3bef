"""`jetwake bench router`: what one routing decision costs, from token bytes to a chosen worker, on a large prefix index.

In process, on real code: block hashes, prefix index, view of the workers, policy. The index is filled from encoded KV event messages, as a router is.
Workload: families of prompts that share a prefix; each family is held by its own subset of workers, some of which hold only part
of the prefix; conversations that go on from it are held by one worker. Of the prompts asked for, a tenth match nothing, a fifth
match only their family's prefix, and the others also a part of a conversation. Between decisions a few workers tell their load.
"""

import gc
import json
import random
import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter

import psutil
from rich.console import Console

from ..producers.policies import Policy, Query, make_policy
from ..producers.prefix_index import PrefixIndex
from ..schemas.blocks import block_hashes, pack_hashes, root_hash, unpack_hashes
from ..schemas.codec import decode, encode
from ..schemas.kv_events import KvChange, KvEvents
from .bench_fleet import MODEL, BusyFleet

FAMILIES = 100
BLOCKS_PER_EVENT = 128  # what one prefill step of 2,048 tokens stores
ROUTED_PER_S = 100
STORED_AFTER, REMOVED_AFTER = 50, 200  # decisions
ROOT = root_hash(MODEL)


@dataclass(frozen=True)
class Sizes:
    blocks: int
    workers: int
    prompt_tokens: int
    block_size_tokens: int
    decisions: int

    @property
    def block_bytes(self) -> int:
        return 4 * self.block_size_tokens

    @property
    def prompt_blocks(self) -> int:
        return self.prompt_tokens // self.block_size_tokens


@dataclass(frozen=True)
class RouterFigures:
    """`lookup`: the index alone; `decision`: hashes, lookup, view of the workers and policy; `predict`: telling the index of the decision, after it.

    `events`: from the bytes of a message to the changed index; `apply` is the part of it after decoding. `bytes_per_block`: growth
    of the process's resident memory while the index was filled.
    """

    lookup_us_p50: float
    lookup_us_p99: float
    decision_us_p50: float
    decision_us_p99: float
    predict_us_p50: float
    events_blocks_per_s: int
    apply_blocks_per_s: int
    bytes_per_block: float
    blocks: int
    workers: int
    prompt_tokens: int
    block_size_tokens: int
    decisions: int
    policy: str


@dataclass(frozen=True)
class Family:
    prefix: bytes
    workers: Sequence[int]


class Workload:
    """Seeded. Tokens are random bytes: hashing does not mind. Conversations are kept as seeds, and made again when asked for."""

    def __init__(self, sizes: Sizes, seed: int) -> None:
        self._sizes = sizes
        self._random = random.Random(seed)
        self._families = [self._family() for _ in range(FAMILIES)]
        self._conversations: list[tuple[Family, int, int]] = []

    def _family(self) -> Family:
        blocks = self._random.randint(1, max(1, self._sizes.prompt_blocks * 3 // 4))
        held_by = min(self._sizes.workers, self._random.choice((1, 2, 4, 8, 16, self._sizes.workers)))
        return Family(self._tokens(blocks), self._random.sample(range(self._sizes.workers), held_by))

    def _tokens(self, blocks: int) -> bytes:
        return self._random.randbytes(blocks * self._sizes.block_bytes)

    def stores(self) -> Iterator[tuple[int, list[int]]]:
        """A worker and what it stored, until there are `sizes.blocks` distinct blocks."""
        left = self._sizes.blocks
        for family in self._families:
            hashes = self._hashes(family.prefix)[:left]
            left -= len(hashes)
            for place, worker in enumerate(family.workers):
                yield worker, hashes if place == 0 else hashes[: self._random.randint(1, len(hashes))] if hashes else []
        while left:
            family = self._random.choice(self._families)
            most = max(1, self._sizes.prompt_blocks - len(family.prefix) // self._sizes.block_bytes)
            blocks, seed = min(left, self._random.randint(1, most)), self._random.getrandbits(32)
            self._conversations.append((family, blocks, seed))
            left -= blocks
            yield family.workers[0], self._hashes(family.prefix + self._tail(blocks, seed))[-blocks:]

    def _tail(self, blocks: int, seed: int) -> bytes:
        return random.Random(seed).randbytes(blocks * self._sizes.block_bytes)

    def _hashes(self, tokens: bytes) -> list[int]:
        return block_hashes(tokens, self._sizes.block_size_tokens, ROOT)

    def messages(self) -> Iterator[bytes]:
        numbers = dict[int, int]()
        for worker, hashes in self.stores():
            for start in range(0, len(hashes), BLOCKS_PER_EVENT):
                numbers[worker] = numbers.get(worker, 0) + 1
                change = KvChange(kind="stored", hashes=pack_hashes(hashes[start : start + BLOCKS_PER_EVENT]))
                yield encode(KvEvents(worker=f"worker-{worker}", incarnation="1", number=numbers[worker], changes=[change]))

    def prompt(self) -> bytes:
        kind, known = self._random.random(), b""
        if kind > 0.3 and self._conversations:
            family, blocks, seed = self._random.choice(self._conversations)
            known = family.prefix + self._tail(blocks, seed)[: self._random.randint(1, blocks) * self._sizes.block_bytes]
        elif kind > 0.1:
            known = self._random.choice(self._families).prefix
        return (known + self._tokens(self._sizes.prompt_blocks))[: 4 * self._sizes.prompt_tokens]


def measure_router(sizes: Sizes, policy_name: str, seed: int = 1) -> RouterFigures:
    """Raises SetupError for a policy there is not."""
    policy, workload, index = make_policy(policy_name, seed), Workload(sizes, seed), PrefixIndex(sizes.blocks * 5 // 4)
    messages = list(workload.messages())
    gc.collect()
    before_bytes = psutil.Process().memory_info().rss
    event_blocks, decode_s, apply_s = _fill(index, messages)
    bytes_per_block = (psutil.Process().memory_info().rss - before_bytes) / index.blocks
    blocks = index.blocks
    lookups_s, decisions_s, predictions_s = _decide(index, policy, workload, sizes)
    return RouterFigures(
        lookup_us_p50=percentile_us(lookups_s, 50),
        lookup_us_p99=percentile_us(lookups_s, 99),
        decision_us_p50=percentile_us(decisions_s, 50),
        decision_us_p99=percentile_us(decisions_s, 99),
        predict_us_p50=percentile_us(predictions_s, 50),
        events_blocks_per_s=round(event_blocks / (decode_s + apply_s)),
        apply_blocks_per_s=round(event_blocks / apply_s),
        bytes_per_block=round(bytes_per_block, 1),
        blocks=blocks,
        policy=policy_name,
        **{name: value for name, value in asdict(sizes).items() if name != "blocks"},
    )


def _fill(index: PrefixIndex, messages: Sequence[bytes]) -> tuple[int, float, float]:
    """Event blocks applied, and the seconds it took to decode and to apply them."""
    blocks, decode_s, apply_s = 0, 0.0, 0.0
    for message in messages:
        start_s = perf_counter()
        events = decode(message, KvEvents)
        changes = [unpack_hashes(change.hashes) for change in events.changes]
        decoded_s = perf_counter()
        for hashes in changes:
            index.stored(f"{events.worker}-{events.incarnation}", hashes)
            blocks += len(hashes)
        decode_s += decoded_s - start_s
        apply_s += perf_counter() - decoded_s
    return blocks, decode_s, apply_s


def _decide(index: PrefixIndex, policy: Policy, workload: Workload, sizes: Sizes) -> tuple[list[float], list[float], list[float]]:
    """Seconds of each lookup, decision and prediction."""
    lookups_s, decisions_s, predictions_s = list[float](), list[float](), list[float]()
    fleet, fresh = BusyFleet(sizes.workers), deque[tuple[str, list[int]]]()
    for number in range(sizes.decisions):
        tokens, now_s = workload.prompt(), number / ROUTED_PER_S
        fleet.move_on()
        start_s = perf_counter()
        hashes = block_hashes(tokens, sizes.block_size_tokens, ROOT)
        hashed_s = perf_counter()
        matches = index.match(hashes, now_s)
        matched_s = perf_counter()
        query = Query(f"request-{number}", sizes.prompt_tokens, sizes.block_size_tokens, matches)
        lane = policy.choose(fleet.candidates(), query).lane
        chosen_s = perf_counter()
        fleet.routed(number, lane, sizes.prompt_tokens - query.cached_tokens(lane))
        booked_s = perf_counter()
        index.predict(lane, hashes, now_s)
        predictions_s.append(perf_counter() - booked_s)
        fresh.append((lane, hashes[matches.get(lane, 0) :]))
        _follow(index, fresh)
        lookups_s.append(matched_s - hashed_s)
        decisions_s.append(chosen_s - start_s)
    return lookups_s, decisions_s, predictions_s


def _follow(index: PrefixIndex, fresh: deque[tuple[str, list[int]]]) -> None:
    """What workers then say: they store what was predicted, and later remove it, leaves first, so that the index keeps its size."""
    if len(fresh) > STORED_AFTER:
        index.stored(*fresh[-STORED_AFTER])
    if len(fresh) > REMOVED_AFTER:
        lane, hashes = fresh.popleft()
        index.removed(lane, hashes[::-1])


def percentile_us(times_s: Sequence[float], percent: int) -> float:
    return round(statistics.quantiles(times_s, n=100, method="inclusive")[percent - 1] * 1e6, 1)


def print_router(figures: RouterFigures, as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(figures)))
        return
    console = Console()
    console.print(
        f"{figures.blocks:,} blocks over {figures.workers} workers; {figures.decisions:,} prompts of {figures.prompt_tokens:,} tokens"
    )
    console.print(f"lookup in the index     p50 {figures.lookup_us_p50:.0f} us   p99 {figures.lookup_us_p99:.0f} us")
    console.print(f"decision, {figures.policy:<13} p50 {figures.decision_us_p50:.0f} us   p99 {figures.decision_us_p99:.0f} us")
    console.print(f"prediction after it     p50 {figures.predict_us_p50:.0f} us")
    console.print(f"events                  {figures.events_blocks_per_s:,} blocks/s ({figures.apply_blocks_per_s:,} without decoding)")
    console.print(f"memory                  {figures.bytes_per_block:.0f} bytes per block")
