"""`jetwake nats declare`: brings a broker to the declared state as a user that may, with what others then only use.

Writes streams, buckets, shared consumers, the queues of models, and the secret of cache salts.
"""

from collections.abc import Sequence

from ..pipeline.connection import Bus
from ..pipeline.key_bucket import KeyBucket
from ..pipeline.publish import Publisher
from ..pipeline.settings import TopologySettings
from ..pipeline.topology import consumer_count, ensure_consumer, ensure_topology
from ..schemas.streams import batch_consumer, jobs_consumer_of
from ..schemas.subjects import model_token


async def declare_all(bus: Bus, settings: TopologySettings, models: Sequence[str]) -> list[str]:
    """A line for each thing that was made or changed. Raises BusError."""
    lines = await ensure_topology(bus, settings)
    for model in models:
        for spec in (jobs_consumer_of(model_token(model)), batch_consumer(model_token(model))):
            if await consumer_count(bus, spec) is None:
                lines.append(f"consumer {spec.stream}/{spec.durable}: missing")
            await ensure_consumer(bus, spec)
    await KeyBucket(bus, Publisher(bus)).secret()
    return lines
