"""When a worker tells its load: that it has no prefill left is no later than routers need it."""

import asyncio

from jetwake.consumers.engine_simulated import SimulatedEngine, SimulatedSettings
from jetwake.consumers.workload import LoadReporter, Workload
from jetwake.pipeline.connection import Bus
from jetwake.pipeline.publish import Publisher
from jetwake.schemas import subjects
from jetwake.schemas.codec import decode
from jetwake.schemas.requests import InferenceRequest
from jetwake.schemas.tokens import pack_tokens
from jetwake.schemas.workers import WorkerCard, WorkerLoad

from ..schemas.examples import EXAMPLES

CARD = next(example for example in EXAMPLES if isinstance(example, WorkerCard))
AN_HOUR_S = 3600.0
PATIENCE_S = 20.0
REQUEST = InferenceRequest(request_id="r", gateway="g", model=CARD.model, prompt_tokens=pack_tokens([1, 2, 3]))


async def test_a_worker_without_prefills_says_so_at_once(bus: Bus, publisher: Publisher, unique: str) -> None:
    """Else the next request waits in the router for a worker that is idle."""
    work = Workload(slots=8)
    card = CARD.model_copy(update={"worker": unique})
    engine = SimulatedEngine(SimulatedSettings(vocabulary_size=100, max_model_len_tokens=64, num_blocks=8))
    reporter = LoadReporter(publisher, card, [work], engine, lambda: (0, 0), work.free_slots, at_most_every_s=AN_HOUR_S)
    told: asyncio.Queue[WorkerLoad] = asyncio.Queue()
    await bus.subscribe(subjects.load(unique), lambda message: told.put_nowait(decode(message.data, WorkerLoad)))
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
        reporting = tasks.create_task(reporter.run())
        assert (await told.get()).fetched_requests == 0
        async with work.holding(REQUEST, sequence=7, new_tokens=3) as longer:
            async with work.holding(REQUEST, sequence=8, new_tokens=3) as shorter:
                shorter.measured(3)  # another is left: nothing that is worth a report before its time
            longer.measured(3)
            free = await told.get()
            assert (free.running_prefills, free.fetched_sequence, free.finished_requests, free.running_requests) == (0, 8, 1, 1)
        async with work.holding(REQUEST):  # by handoff: no prefill ends here
            pass
        async with work.holding(REQUEST, sequence=9):  # all of it cached
            pass
        free = await told.get()
        assert (free.fetched_sequence, free.finished_requests) == (9, 4)
        assert told.empty()
        reporting.cancel()
