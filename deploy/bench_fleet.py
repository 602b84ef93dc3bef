"""The workers of `jetwake bench router`, as a router knows them: real cards, loads and queues, which change between decisions."""

import random

from ..producers.fleet import Candidate, Fleet
from ..producers.lane_ledger import LaneLedger
from ..schemas.workers import KvCompatibility, PrefillTiming, Role, WorkerCard, WorkerLoad

LOADS_PER_DECISION = 4
MODEL = "bench"
TIMING = PrefillTiming(base_s=0.02, per_token_s=0.0001)


class BusyFleet:
    """Prefill workers with a decode worker that has met them all, and one router's view of them: what is routed queues, is taken, and ends."""

    def __init__(self, workers: int) -> None:
        self._random = random.Random(0)
        self._ledger = LaneLedger()
        self._fleet = Fleet(self._ledger)
        prefill = [_card(f"worker-{worker}", "prefill") for worker in range(workers)]
        decode = _card("decode-1", "decode").model_copy(update={"peers": [card.lane for card in prefill]})
        self._cards = {card.worker: card for card in (*prefill, decode)}
        self._prefill = prefill
        for card in prefill:
            self._tell(card)

    def candidates(self) -> tuple[Candidate, ...]:
        return self._fleet.candidates(MODEL, self._cards)

    def routed(self, number: int, lane: str, new_tokens: int) -> None:
        self._ledger.stored(self._ledger.book(f"request-{number}", lane, TIMING.seconds(new_tokens)), number + 1)

    def move_on(self) -> None:
        """Some workers take what waits for them, and tell what they run."""
        for card in self._random.sample(self._prefill, min(LOADS_PER_DECISION, len(self._prefill))):
            queued = self._ledger.queued(card.lane)
            if queued:
                self._ledger.fetched(card.lane, queued[0].sequence)
            self._tell(card)

    def _tell(self, card: WorkerCard) -> None:
        running = self._random.randrange(4)
        load = WorkerLoad(
            worker=card.worker,
            incarnation=card.incarnation,
            running_requests=running,
            running_prompt_tokens=4000 * running,
            running_new_tokens=1000 * running,
            prefill_left_s=0.1 * running,
            free_slots=4 - running,
            prefill_timing=TIMING,
        )
        self._fleet.loaded(card.lane, load)


def _card(name: str, role: Role) -> WorkerCard:
    same = KvCompatibility(
        engine="simulated",
        engine_version="1",
        nixl_version="1",
        model=MODEL,
        revision="",
        dtype="bfloat16",
        kv_dtype="bfloat16",
        block_size_tokens=16,
        tensor_parallel=1,
    )
    return WorkerCard(
        worker=name,
        incarnation="1",
        role=role,
        model=MODEL,
        pool="bench",
        compatibility=same,
        capacity_blocks=10_000,
        capacity_slots=4,
        max_model_len_tokens=16_384,
    )
