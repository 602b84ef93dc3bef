"""`jetwake up`: a whole system on one machine, as supervised processes: broker, router, workers.

Writes one small file that tells other commands where the broker is. Promises: `ready` is said when a request was really served
from end to end; after the end no process and no lock is left.
"""

import asyncio
import fcntl
import json
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from ..consumers.scratch import ScratchFolder
from ..pipeline.settings import BrokerSettings
from ..producers.client import Client
from ..producers.policies import make_policy
from ..schemas.errors import BrokerUnavailable, DeadlineExceeded, JetwakeError, SetupError, StreamMissing, UnknownModel
from .configuration import NOTHING_CONFIGURED, Configuration
from .demo_model import fetch
from .engines import ENGINES
from .limits import topology_settings_of
from .local_gateway import LocalGateway, admin_url, engine_options_for
from .nats_server import NatsServer
from .options import parse_options
from .role_settings import router_settings, worker_settings
from .shared_cores import share_cores
from .supervisor import Child, Supervisor

CANARY_TIMEOUT_S = 60.0
URL_VARIABLE = "JETWAKE_NATS_URL"
AFTER_GRACE_S = 10.0
"""For what a worker does when the grace of its drain is over: giving the rest to others, and ending its engine."""


@dataclass(frozen=True)
class LocalSystem:
    """What `up` starts. `engine_arguments` go to every worker's command line, `common_arguments` to all, `broker` None: an embedded one on a free port."""

    model: str
    policy: str
    prefill: int
    decode: int
    aggregated: int
    engine_arguments: Sequence[str]
    router_arguments: Sequence[str] = ()
    broker: BrokerSettings | None = None
    common_arguments: Sequence[str] = ()
    store: Path | None = None
    grace_s: float = 40.0
    gateway: LocalGateway | None = None
    worker_arguments: Sequence[str] = ()
    limit_arguments: Sequence[str] = ()


def local_system(
    engine: str,
    model: str,
    served_model_name: str,
    engine_options: Sequence[str],
    policy: str,
    counts: tuple[int, int, int],
    store: Path | None,
    broker: BrokerSettings | None,
    report: Callable[[str], None] = lambda _: None,
    router_options: Sequence[str] = (),
    gateway: LocalGateway | None = None,
    worker_options: Sequence[str] = (),
    limits: Sequence[str] = (),
    configuration: Configuration = NOTHING_CONFIGURED,
) -> LocalSystem:
    """From `up`'s options. `counts`: prefill, decode, aggregated. Raises SetupError for what can serve nothing.

    Options that can be wrong are tried here, and the model is made ready, before any process starts. `report` hears of that.
    The processes read the file of `configuration` themselves.
    """
    prefill, decode, aggregated = counts
    if bool(prefill) != bool(decode):
        raise SetupError(f"{prefill} prefill and {decode} decode workers: each needs at least one of the other")
    if not prefill and not aggregated:
        raise SetupError("no workers: give --prefill and --decode, or --aggregated")
    make_policy(policy)
    router_settings("router-1", policy, router_options, configuration.section("router"))
    known_options = configuration.section(engine) | parse_options(engine_options, "--engine-option")
    drain_s = worker_settings("any", "prefill", "", worker_options, configuration.section("worker")).grace_s + AFTER_GRACE_S
    topology_settings_of(limits, configuration.section("limits"))
    if engine not in ENGINES:
        raise SetupError(f"no engine is called {engine!r}; there are {', '.join(ENGINES)}")
    if engine == "vllm":
        fetch(model, report=report)  # once and in sight, instead of in every worker and in its log
    if gateway is not None:
        flags = (*configuration.section("gateway").get("flags", ()), *gateway.flags)
        engine_options = [*engine_options, *engine_options_for(flags, engine, model, known_options)]
    arguments = ["--engine", engine, "--model", model, "--served-model-name", served_model_name or model]
    for option in engine_options:
        arguments += ["--engine-option", option]
    return LocalSystem(
        model=served_model_name or model,
        policy=policy,
        router_arguments=[word for option in router_options for word in ("--router-option", option)],
        prefill=prefill,
        decode=decode,
        aggregated=aggregated,
        engine_arguments=arguments,
        broker=broker,
        common_arguments=[
            *(["--config", str(configuration.file)] if configuration.file else []),
            *(broker_arguments(broker) if broker else []),
        ],
        store=store,
        gateway=gateway,
        grace_s=drain_s,
        worker_arguments=[word for option in worker_options for word in ("--worker-option", option)],
        limit_arguments=[word for option in limits for word in ("--limit", option)],
    )


def broker_arguments(broker: BrokerSettings) -> list[str]:
    """The options that give a child the same broker; its URL, which may hold a password, is passed in the environment."""
    files = {
        "--nats-credentials": broker.credentials,
        "--nats-nkey-file": broker.nkey_file,
        "--nats-tls-ca": broker.tls_ca,
        "--nats-tls-cert": broker.tls_cert,
        "--nats-tls-key": broker.tls_key,
    }
    given = [word for option, path in files.items() if path is not None for word in (option, str(path))]
    return [*given, "--nats-inbox-prefix", broker.inbox_prefix, "--nats-topology", broker.topology]


def state_file() -> Path:
    return Path(os.environ.get("JETWAKE_STATE_DIR") or platformdirs.user_state_dir("jetwake")) / "up.json"


def running_url() -> str | None:
    """The broker of the `jetwake up` that runs on this machine, or None."""
    try:
        state = json.loads(state_file().read_text())
        os.kill(int(state["pid"]), 0)
        return str(state["nats_url"])
    except (FileNotFoundError, ProcessLookupError, ValueError, KeyError):
        return None


def children_of(system: LocalSystem, url: str, logs: Path) -> list[Child]:
    """The processes of the system, routers first. Pure."""
    connection, environment = system.common_arguments, {URL_VARIABLE: url}
    children = [
        Child(
            "router-1",
            ["router", "--name", "router-1", "--policy", system.policy, *system.router_arguments, *system.limit_arguments, *connection],
            logs / "router-1.log",
            environment,
        )
    ]
    for role, count in (("prefill", system.prefill), ("decode", system.decode), ("aggregated", system.aggregated)):
        for number in range(1, count + 1):
            name = f"{role}-{number}"
            own = [*system.engine_arguments, *system.worker_arguments, *system.limit_arguments]
            children.append(Child(name, [role, "--name", name, *own, *connection], logs / f"{name}.log", environment))
    if system.gateway is not None:
        arguments = [*system.gateway.arguments(system.model, ready_file(logs)), *system.limit_arguments]
        children.append(Child("gateway-1", [*arguments, *connection], logs / "gateway-1.log", environment))
    return children


def ready_file(logs: Path) -> Path:
    """Where the gateway says that it serves."""
    return logs / "gateway-1.ready"


@asynccontextmanager
async def locked_store(store: Path | None) -> AsyncGenerator[Path]:
    """The folder of broker data and logs; a temporary one when None. Raises SetupError when another system uses it."""
    if store is None:
        scratch = ScratchFolder("jetwake-up-")  # a kind of its own: the next one removes what is left of this one, and of no other
        try:
            yield scratch.path
        finally:
            scratch.remove()
        return
    store.mkdir(parents=True, exist_ok=True)
    with (store / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SetupError(f"another `jetwake up` uses {store}: stop it, or give this one another --store") from None
        yield store


async def run_local(
    system: LocalSystem, stopping: asyncio.Event, on_ready: Callable[[str, str], None], on_change: Callable[[Sequence[Child]], None]
) -> None:
    """Runs the system until `stopping`. `on_ready` hears where its broker is, and its live page (empty: there is no gateway).

    Raises SetupError when a part of it can never start.
    """
    share_cores()
    async with locked_store(system.store) as store, broker_of(system, store) as broker:
        ready_file(store / "logs").unlink(missing_ok=True)
        children = children_of(system, broker.url, store / "logs")
        supervisor = Supervisor(children, system.grace_s, lambda: on_change(children))
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(supervisor.run())
                ready = tasks.create_task(_say_ready(system, broker, store, on_ready))
                await stopping.wait()
                ready.cancel()
                supervisor.stop()
        except BaseExceptionGroup as group:
            ours = group.subgroup(JetwakeError)
            if ours is None:
                raise
            raise ours.exceptions[0] from None


@asynccontextmanager
async def broker_of(system: LocalSystem, store: Path) -> AsyncGenerator[BrokerSettings]:
    if system.broker is not None:
        yield system.broker
        return
    async with NatsServer(store / "broker", log_file=store / "logs" / "broker.log") as server:
        path = state_file()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"nats_url": server.url, "pid": os.getpid()}))
        try:
            yield BrokerSettings(url=server.url)
        finally:
            path.unlink(missing_ok=True)


async def _say_ready(system: LocalSystem, broker: BrokerSettings, store: Path, on_ready: Callable[[str, str], None]) -> None:
    await wait_until_served(broker, system.model)
    page_url = f"{await admin_url(ready_file(store / 'logs'))}/dashboard" if system.gateway is not None else ""
    on_ready(broker.url, page_url)


async def wait_until_served(broker: BrokerSettings, model: str) -> None:
    """Returns when a tiny request went through the whole pipeline: also the first handshake and the first pull are done then."""
    while True:
        try:
            async with Client.connect(broker) as client:
                await client.generate([1], model=model, max_tokens=2, temperature=0.0, ignore_eos=True, timeout_s=CANARY_TIMEOUT_S)
                return
        except (StreamMissing, UnknownModel, DeadlineExceeded):
            await asyncio.sleep(0.1)  # nobody has declared the streams, told of the model, or taken the request yet
        except BrokerUnavailable:
            if "," not in broker.url:
                raise
            await asyncio.sleep(0.1)  # a cluster whose streams are just being made: they have no leaders yet
