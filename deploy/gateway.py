"""Composition of a gateway process: the connection, the model it serves, and vLLM's application around both."""

import asyncio
import logging
from collections.abc import Callable

from ..pipeline.catalogue import ModelCatalogue
from ..pipeline.clock import ServerClock
from ..pipeline.connection import Bus
from ..pipeline.permissions import inbox_prefix
from ..pipeline.publish import Publisher
from ..pipeline.replies import ReplyInbox
from ..pipeline.settings import BrokerSettings, TopologySettings
from ..pipeline.topology_keeper import TopologyKeeper
from ..producers.gateway.exposure import is_loopback
from ..producers.gateway.kept_streams import KeptStreams
from ..producers.gateway.key_keeper import KeyKeeper
from ..producers.gateway.settings import GatewaySettings
from ..producers.gateway.submission import Submitter
from ..schemas.errors import BusError, SetupError
from ..schemas.workers import ModelCard
from .app import Loop, run_until
from .dashboard.server import Dashboard, for_loopback
from .gateway_batches import GatewayBatches
from .gateway_doors import Doors
from .health import Health, HealthTeller

log = logging.getLogger(__name__)

MODEL_POLL_S = 0.25
NO_RIGHTS = "a gateway's user may not look: start it with --dashboard-nkey-file and the observer's seed, or run `jetwake dashboard` as that"


async def run_gateway(
    settings: GatewaySettings,
    broker: BrokerSettings,
    topology: TopologySettings,
    stopping: asyncio.Event,
    on_ready: Callable[[str, str], None] = lambda url, admin_url: None,
    health: HealthTeller | None = None,
    metrics_text: Callable[[], bytes] = bytes,
) -> None:
    """Serves until `stopping` is set; then lets its answers end. `on_ready` hears the public and the admin URL."""
    # A client with a timeout of its own is better served by a soon refusal than by a late acceptance.
    patient = broker.model_copy(update={"publish_deadline_s": min(broker.publish_deadline_s, settings.store_patience_s)})
    async with Bus.connect(patient, name=settings.name) as bus:
        keeper = TopologyKeeper(bus, topology)
        await keeper.start()
        publisher, clock = Publisher(bus), ServerClock(bus)
        await clock.sync()
        card = await wait_for_model(ModelCatalogue(bus, publisher), settings, stopping)
        if card is None:
            return
        keys = KeyKeeper(bus, publisher, settings.api_keys, 1 / settings.quota_replicas)
        await keys.open()
        inbox = ReplyInbox(bus, settings.name, clock)
        await inbox.start()
        submitter = Submitter(bus, publisher, inbox, clock, card, settings.retry_after_s)

        from ..producers.gateway.application import prepare_environment, source_of

        prepare_environment(source_of(card, settings))

        from ..producers.gateway.server import GatewayServer  # imports vLLM: seconds

        batches = GatewayBatches(settings.batches, bus, publisher, clock, settings.name, card.model)
        kept = KeptStreams(bus, publisher, inbox, settings.resume_grace_s) if settings.resume_grace_s else None
        dashboard = Dashboard(looking_broker(broker, settings), NO_RIGHTS if settings.dashboard_nkey_file is None else "")
        page = for_loopback(dashboard.app) if is_loopback(settings.admin_host) else dashboard.app
        server = GatewayServer(settings, submitter, keys.gate, batches.routes(settings.retry_after_s), kept, page, metrics_text)
        await server.open()
        if server.app is not None:
            batches.start(server.app, server.names, server.own_headers)
        doors = None
        if settings.over_nats and server.app is not None:
            doors = Doors(settings, bus, publisher, clock, inbox, server.app, server.names)
            await doors.start()
        if health is not None:
            health.ready(lambda: health_of_gateway(submitter, stopping))
        on_ready(server.url, server.admin_url)

        async def drain() -> None:
            server.stop()
            await batches.stop()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_with(served))
                if doors is not None:
                    tasks.create_task(doors.stop())
            await submitter.finish_background()
            await inbox.close()

        served = asyncio.ensure_future(server.run())
        loops: list[Loop] = [bus.failed(), keeper.run(), clock.run(), keys.run(), batches.run(), dashboard.run(), _with(served)]
        if doors is not None:
            loops.append(doors.run())
        await run_until(stopping, loops, drain)


def looking_broker(broker: BrokerSettings, settings: GatewaySettings) -> BrokerSettings:
    """As whom the live page looks: where the broker has users, a gateway's own may not."""
    if settings.dashboard_nkey_file is None:
        return broker
    observer = {"nkey_file": settings.dashboard_nkey_file, "credentials": None, "inbox_prefix": inbox_prefix("observer"), "name": ""}
    return broker.model_copy(update=observer)


def health_of_gateway(submitter: Submitter, stopping: asyncio.Event) -> Health:
    if stopping.is_set():
        return Health("draining")
    refusal = submitter.refusal()
    return Health("ready") if refusal is None else Health("cut off", str(refusal))


async def _with(served: "asyncio.Future[None]") -> None:
    await asyncio.shield(served)


async def wait_for_model(catalogue: ModelCatalogue, settings: GatewaySettings, stopping: asyncio.Event) -> ModelCard | None:
    """The card of the model to serve, as soon as a worker has told of it; None when told to stop first. Raises SetupError."""
    try:
        async with asyncio.timeout(settings.model_timeout_s):
            while not stopping.is_set():
                try:
                    cards = {card.model: card for card in await catalogue.all()}
                except BusError as error:
                    log.warning("models not read, trying again: %s", error)
                    cards = {}
                if settings.model is None and len(cards) > 1:
                    raise SetupError(f"which model? --model is one of {', '.join(sorted(cards))}")
                name = settings.model or next(iter(cards), None)
                if name is not None and name in cards:
                    return cards[name]
                await asyncio.sleep(MODEL_POLL_S)
    except TimeoutError:
        what = f"of {settings.model}" if settings.model else "of any model"
        raise SetupError(f"no worker {what} was heard of within {settings.model_timeout_s:g} s: is one running?") from None
    return None
