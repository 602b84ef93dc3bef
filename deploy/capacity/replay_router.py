"""The router's part of a replay: the product's policy, prefix index, fleet and ledger, fed and asked as the live router does it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...consumers.block_pool import PoolEvents, Removed, Stored
from ...producers.assignment import Waiting
from ...producers.fleet import Fleet
from ...producers.holding import plan
from ...producers.lane_ledger import LaneLedger
from ...producers.policies import Decision, KvAware, Query, make_policy
from ...producers.prefix_index import PrefixIndex
from ...schemas.workers import KvCompatibility, Role, WorkerCard, WorkerLoad
from .replay_settings import ReplaySettings

MODEL = "replayed"
INCARNATION = "0"
LEAST_PAUSE_S = 0.001
"""Between two looks at what waits."""


@dataclass(frozen=True, slots=True)
class Routing:
    number: int
    worker: str
    cached_tokens: int
    new_tokens: int


@dataclass(frozen=True, slots=True)
class _Request:
    number: int
    prompt_tokens: int
    hashes: Sequence[int]
    session: str
    since_s: float


class ReplayRouter:
    def __init__(self, settings: ReplaySettings, workers: Sequence[tuple[str, Role]]) -> None:
        self._cards = _cards(settings, workers)
        self._worker_of = {card.lane: card.worker for card in self._cards.values()}
        self._follows_caches = settings.follows_caches
        self._block_size_tokens = settings.block_size_tokens
        self._policy = make_policy(settings.policy, settings.seed, settings.knobs)
        self._ledger = LaneLedger()
        self._fleet = Fleet(self._ledger)
        self._index = PrefixIndex(2 * settings.blocks * len(workers))
        self._session_lanes: dict[str, str] = {}
        self._requests: dict[int, _Request] = {}
        self.due_s = math.inf
        self._sequences = dict.fromkeys(self._worker_of, 0)

    @property
    def kept(self) -> int:
        """Requests that wait in the router."""
        return len(self._requests)

    def receive(self, number: int, prompt_tokens: int, hashes: Sequence[int], session: str, now_s: float) -> None:
        self._requests[number] = _Request(number, prompt_tokens, hashes, session, now_s)
        self.due_s = min(self.due_s, now_s)

    def decide(self, now_s: float) -> list[Routing]:
        """Those that go now. Others wait here; `due_s` says when to ask again, unless something is heard before."""
        self.due_s = math.inf
        candidates = self._fleet.candidates(MODEL, self._cards)
        if not isinstance(self._policy, KvAware):
            return [self._send(one, self._query(one, now_s), None, now_s) for one in list(self._requests.values())]
        waiting = {one.number: Waiting(self._query(one, now_s), one.since_s) for one in self._requests.values()}
        made = plan(self._policy, list(waiting.values()), candidates, now_s)
        self.due_s = max(made.look_again_s, now_s + LEAST_PAUSE_S)
        return [self._send(self._requests[int(one.query.request_id)], one.query, decision, now_s) for one, decision in made.sends]

    def _query(self, one: _Request, now_s: float) -> Query:
        matches = self._index.match(one.hashes, now_s) if self._follows_caches else {}
        session_lane = self._session_lanes.get(one.session, "") if one.session else ""
        return Query(str(one.number), one.prompt_tokens, self._block_size_tokens, matches, session_lane)

    def _send(self, one: _Request, query: Query, decision: Decision | None, now_s: float) -> Routing:
        candidates = self._fleet.candidates(MODEL, self._cards)
        lane = (decision or self._policy.choose(candidates, query, now_s)).lane
        chosen = next(candidate for candidate in candidates if candidate.lane == lane)
        booking = self._ledger.book(query.request_id, lane, chosen.prefill_s(query), now_s)
        del self._requests[one.number]
        if one.session:
            self._session_lanes[one.session] = lane
        if self._follows_caches:
            self._index.predict(lane, one.hashes, now_s)
        self._sequences[lane] += 1
        self._ledger.stored(booking, self._sequences[lane])
        cached_tokens = query.cached_tokens(lane)
        return Routing(one.number, self._worker_of[lane], cached_tokens, one.prompt_tokens - cached_tokens)

    def heard_load(self, load: WorkerLoad, now_s: float) -> None:
        lane = f"{load.worker}-{load.incarnation}"
        self._fleet.loaded(lane, load, now_s)
        if self._requests:
            self.due_s = min(self.due_s, now_s)
        self._ledger.fetched(lane, load.fetched_sequence)

    def heard_events(self, worker: str, events: PoolEvents) -> None:
        lane = self._cards[worker].lane
        for event in events.events:
            if isinstance(event, Stored):
                self._index.stored(lane, event.block_hashes)
            elif isinstance(event, Removed):
                self._index.removed(lane, event.block_hashes)
            else:
                self._index.cleared(lane)


def _cards(settings: ReplaySettings, workers: Sequence[tuple[str, Role]]) -> dict[str, WorkerCard]:
    compatibility = KvCompatibility(
        engine="replay",
        engine_version="1",
        nixl_version="",
        model=MODEL,
        revision="",
        dtype="",
        kv_dtype="",
        block_size_tokens=settings.block_size_tokens,
        tensor_parallel=1,
    )
    return {
        worker: WorkerCard(
            worker=worker,
            incarnation=INCARNATION,
            role=role,
            model=MODEL,
            pool=MODEL,
            compatibility=compatibility,
            capacity_blocks=(settings.decode_blocks or settings.blocks) if role == "decode" else settings.blocks,
            capacity_slots=settings.max_sequences,
            max_model_len_tokens=settings.blocks * settings.block_size_tokens,
            peers=[f"{other}-{INCARNATION}" for other, other_role in workers if other_role == "prefill"] if role == "decode" else [],
        )
        for worker, role in workers
    }
