"""What commands share: options, the broker they talk to, and how an error becomes one line and an exit code.

Exit codes: 0 done, 1 the request failed, 2 bad usage (an option, a file, the installation), 3 no broker. Nothing heavy is
imported before the command that needs it runs.
"""

import asyncio
import functools
import inspect
import signal
import sys
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from .configured import Config, configured

if TYPE_CHECKING:
    from ...pipeline.settings import BrokerSettings, TopologySettings

EXIT_FAILED, EXIT_USAGE, EXIT_NO_BROKER = 1, 2, 3

EngineKind = Annotated[str, typer.Option("--engine", help="vllm, or simulated (no model: for tests and scale).")]
Model = Annotated[str, typer.Option("--model", help="demo, tiny (random weights), a folder, or a Hugging Face name.")]
ServedName = Annotated[str, typer.Option("--served-model-name", help="The name requests use. Else: --model as given.")]
EngineOptions = Annotated[
    list[str] | None,
    typer.Option("--engine-option", help="KEY=VALUE, any option of the engine: `--engine-option max_num_seqs=16`. Repeatable."),
]
Policy = Annotated[str, typer.Option("--policy", help="kv_aware, least_loaded, power_of_two, random or round_robin.")]
RouterOptions = Annotated[
    list[str] | None,
    typer.Option("--router-option", help="KEY=VALUE of the router: `--router-option direct_max_new_tokens=256`. Repeatable."),
]
WorkerOptions = Annotated[
    list[str] | None,
    typer.Option("--worker-option", help="KEY=VALUE of a worker: `--worker-option grace_s=60`. Repeatable."),
]
Limits = Annotated[
    list[str] | None,
    typer.Option(
        "--limit", help="KEY=VALUE, a bound of the queues, the same for all parts of a system: `--limit max_requests=5000`. Repeatable."
    ),
]
HealthFile = Annotated[
    Path | None,
    typer.Option("--health-file", envvar="JETWAKE_HEALTH_FILE", help="Tell there each second how it is, for `jetwake health`."),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]
WhichModel = Annotated[str | None, typer.Option("--model", help="Which model, when there is more than one.")]
Raw = Annotated[bool, typer.Option("--raw", help="Take the prompt as it is, without the model's chat template.")]


def _option(name: str, help: str) -> Any:
    return typer.Option(f"--nats-{name}", envvar=f"JETWAKE_NATS_{name.upper().replace('-', '_')}", help=help)


@dataclass(frozen=True)
class Broker:
    """The broker as options or environment name it. A command asks for it with a parameter of this type and `@takes_broker`.

    `nats_x` is the field `x` of BrokerSettings.
    """

    config: Config = None
    nats_url: Annotated[str | None, _option("url", "An existing NATS server or cluster. Else: that of the running `jetwake up`.")] = None
    nats_credentials: Annotated[Path | None, _option("credentials", "Credentials file: a user's JWT and seed.")] = None
    nats_nkey_file: Annotated[Path | None, _option("nkey-file", "File with a user's seed, as `jetwake nats permissions` writes them.")] = (
        None
    )
    nats_inbox_prefix: Annotated[str | None, _option("inbox-prefix", "Where this user may hear answers.")] = None
    nats_name: Annotated[str | None, _option("name", "Whose replies this user may read. Else: any name.")] = None
    nats_peers: Annotated[str | None, _option("peers", "Other gateways whose streams this one may resume, with commas.")] = None
    nats_topology: Annotated[
        str | None,
        _option("topology", "What this user may do about streams: declare (all of it), restore (make what is missing) or check (wait)."),
    ] = None
    nats_tls_ca: Annotated[Path | None, _option("tls-ca", "CA certificate of the server.")] = None
    nats_tls_cert: Annotated[Path | None, _option("tls-cert", "Client certificate.")] = None
    nats_tls_key: Annotated[Path | None, _option("tls-key", "Key of the client certificate.")] = None

    def settings(self) -> "BrokerSettings":
        """Raises BrokerUnavailable when none is named and no local system runs, and SetupError."""
        from pydantic import ValidationError

        from ...pipeline.settings import BrokerSettings
        from ...schemas.codec import first_complaint
        from ...schemas.errors import BrokerUnavailable, SetupError
        from ..local import running_url

        url = self.nats_url or running_url()
        if url is None:
            raise BrokerUnavailable("no broker: start `jetwake up` in another terminal, or name one with --nats-url")
        given = {field.name.removeprefix("nats_"): getattr(self, field.name) for field in fields(self) if field.name.startswith("nats_")}
        said = configured("nats") | {key: value for key, value in given.items() if value is not None} | {"url": url}
        try:
            return BrokerSettings.model_validate(said)
        except ValidationError as error:
            raise SetupError(f"setting of the broker: {first_complaint(error)}") from error


def takes(name: str, options: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives the command line of a command the options that are the fields of the dataclass, and the command one of these as parameter `name`."""
    names = {field.name for field in fields(options)}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command)
        own = [parameter for parameter in signature.parameters.values() if parameter.name != name]
        added = [
            inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
            for field in fields(options)
        ]

        @functools.wraps(command)
        def with_options(**given: Any) -> None:
            taken = options(**{field: given.pop(field) for field in names})
            command(**given, **{name: taken})

        parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own] + added
        vars(with_options)["__signature__"] = signature.replace(parameters=parameters)
        with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return with_options

    return decorate


takes_broker = takes("broker", Broker)


def run(body: Callable[[], Coroutine[Any, Any, None]], loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None) -> None:
    """Runs a command's coroutine; our errors become one line on standard error and an exit code."""
    from ...schemas.errors import JetwakeError

    async def ungrouped() -> None:
        """A command that runs things side by side fails with a group around the one error that ended it."""
        try:
            await body()
        except BaseExceptionGroup as group:
            ours = group.subgroup(JetwakeError)
            if ours is None:
                raise
            error: BaseException = ours
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            raise error from group

    with _in_one_line(), asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(ungrouped())


def fast_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """For processes that serve. uvloop comes with vLLM."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def run_here(body: Callable[[], None]) -> None:
    """As `run`, for a command that computes and has nothing to wait for: Ctrl-C ends it at once."""
    with _in_one_line():
        body()


@contextmanager
def _in_one_line() -> Generator[None]:
    from ...schemas.errors import BusError, JetwakeError, RequestRefused, SetupError

    try:
        yield
    except JetwakeError as error:
        code = EXIT_FAILED
        if isinstance(error, BusError):
            code = EXIT_NO_BROKER
        elif isinstance(error, SetupError | RequestRefused):
            code = EXIT_USAGE
        print(f"jetwake: {error}", file=sys.stderr)
        raise typer.Exit(code) from error


def stop_on_signals() -> asyncio.Event:
    """Set by SIGTERM or Ctrl-C: drain and leave."""
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    return stopping


def topology_settings(limits: list[str] | None = None) -> "TopologySettings":
    """Raises SetupError naming what is wrong."""
    from ..limits import topology_settings_of

    return topology_settings_of(limits or [], configured("limits"))


def say(text: str) -> None:
    """Progress, on standard error."""
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Logs:
    """How a process writes its log; the fields are options."""

    log_format: Annotated[Literal["text", "json"], typer.Option("--log-format", help="json: one object a line.")] = "text"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], typer.Option("--log-level", help="The least that is worth a line.")
    ] = "info"

    def start(self) -> None:
        from ..log_lines import start_logging

        start_logging(self.log_format, self.log_level)


@dataclass(frozen=True)
class Metrics:
    """Where a process serves its metrics; the fields are options."""

    metrics_port: Annotated[
        int | None, typer.Option("--metrics-port", min=0, max=65535, help="Serve Prometheus metrics; 0: any free port.")
    ] = None
    metrics_host: Annotated[str, typer.Option("--metrics-host", help="Address of that port.")] = "127.0.0.1"

    @contextmanager
    def served(self, role: str, name: str) -> Generator[None]:
        """And whatever `OTEL_*` variables ask for. Raises SetupError."""
        from ...pipeline.telemetry import telemetry

        with telemetry(role, name, self.metrics_port, self.metrics_host) as told:
            if told.url:
                say(f"metrics on {told.url}")
            yield


takes_metrics = takes("metrics", Metrics)
takes_logs = takes("logs", Logs)
