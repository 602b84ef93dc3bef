"""`--config`, and which setting each flag is: what is configured becomes the default of flags, and the base of what has no flag."""

import sys
from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ..configuration import Configuration

_configuration: ContextVar["Configuration | None"] = ContextVar("configuration", default=None)

WORKERS = ("prefill", "decode", "aggregated")
_ENGINE = {"engine": "engine.kind", "model": "engine.model", "served_model_name": "engine.served_model_name"}
_WORKER = {"name": "worker.name", "domain": "worker.domain", **_ENGINE}
_GATEWAY = (
    "port", "host", "model", "tokenizer", "name", "admin_port", "admin_host", "dashboard_nkey_file", "keep_alive_s", "resume_grace_s",
    "request_timeout_s", "api_keys", "allow_open", "quota_replicas", "over_nats", "job_timeout_s", "ready_file",
)  # fmt: skip
_TELEMETRY = ("metrics_port", "metrics_host", "log_format", "log_level")
_UP = ("prefill", "decode", "aggregated", "gateway", "store")

FLAGS: Mapping[str, Mapping[str, str]] = {
    "router": {"name": "router.name", "policy": "router.policy"},
    **dict.fromkeys(WORKERS, _WORKER),
    "gateway": {name: f"gateway.{name}" for name in _GATEWAY},
    "up": {**_ENGINE, "policy": "router.policy", "port": "gateway.port", **{name: f"up.{name}" for name in _UP}},
    "demo": {"engine": "engine.kind", "model": "engine.model"},
}
"""By command and parameter. Those of the broker belong to every command: `nats_x` is the setting `nats.x`."""

PAIRS = {"router_option": "router", "worker_option": "worker", "limit": "limits", "batch_option": "batches", "engine_option": ""}
"""Parameters with `key=value` pairs, and their section. That of the engine is named after its kind."""


def setting_of(command: str | None, parameter: str) -> str | None:
    """`section.key` of a flag."""
    if parameter.startswith("nats_"):
        return f"nats.{parameter.removeprefix('nats_')}"
    if parameter in _TELEMETRY:
        return f"telemetry.{parameter}"
    return FLAGS.get(command or "", {}).get(parameter)


def use_configuration(context: typer.Context, path: Path | None) -> Path | None:
    """What is configured becomes the default of this command's flags. Called before they are read."""
    from ...schemas.errors import SetupError
    from ..configuration import load

    try:
        configuration = load(path)
    except SetupError as error:
        print(f"jetwake: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    _configuration.set(configuration)
    defaults: dict[str, Any] = {}
    for parameter in context.command.params:
        setting = setting_of(context.command.name, parameter.name or "")
        if setting is not None:
            section, _, key = setting.partition(".")
            layer = configuration.layer_of(section, key)
            if layer is not None:
                defaults[parameter.name or ""] = layer.values[section][key]
    context.default_map = defaults
    return path


Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        envvar="JETWAKE_CONFIG",
        is_eager=True,
        callback=use_configuration,
        help="Configuration, TOML or YAML. Else: jetwake.toml in the working directory, if it is there.",
    ),
]


def configuration() -> "Configuration":
    """Of the command that runs."""
    from ..configuration import Configuration

    return _configuration.get() or Configuration()


def configured(section: str) -> dict[str, Any]:
    """What is said of a section, without flags and defaults."""
    return configuration().section(section)
