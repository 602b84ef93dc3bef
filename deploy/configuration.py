"""The settings of every role as one tree, and what a file and the environment say about it.

A flag wins over the environment, that over the file, that over the default. Reads one TOML or YAML file and variables that are named
`JETWAKE_<SECTION>_<KEY>`. Promises: a key that nothing knows is an error that names the nearest one; every value knows where it came from.
New settings belong into the model of a section, a new group of them into SECTIONS: file, environment, `config show` and the reference
page follow from there.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, TypeAdapter, ValidationError, create_model

from ..consumers.engine_vllm.settings import VllmSettings
from ..pipeline.settings import BrokerSettings, TopologySettings
from ..producers.batches.settings import BatchSettings
from ..producers.gateway.settings import GatewaySettings
from ..schemas.errors import SetupError
from .role_settings import EngineSettings, RouterSettings, SimulatedOptions, TelemetrySettings, UpSettings, WorkerSettings

FILE_NAME = "jetwake.toml"
FILE_VARIABLE = "JETWAKE_CONFIG"
PREFIX = "JETWAKE_"
"""Of what a user says. What processes of Jetwake tell their children begins with an underscore, so that it is never taken for a setting."""

_KUBERNETES = re.compile(r"(^|_)(service_host|service_port(_\w+)?|port_\d+_(tcp|udp)(_\w+)?)$")
"""Kubernetes tells every pod of the services around it: with one called jetwake-gateway there is a JETWAKE_GATEWAY_SERVICE_HOST."""


@dataclass(frozen=True)
class Section:
    """`apart`: fields of the model that are said elsewhere, and where. `stand_ins`: for those of them without which nothing can be checked."""

    name: str
    model: type[BaseModel]
    about: str
    apart: Mapping[str, str] = field(default_factory=dict[str, str])
    stand_ins: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def keys(self) -> list[str]:
        return [key for key in self.model.model_fields if key not in self.apart]


_ENGINE_NAMES = {"model": "it is engine.model", "served_name": "it is engine.served_model_name"}

SECTIONS = (
    Section("nats", BrokerSettings, "The broker, for every command that talks to one."),
    Section("limits", TopologySettings, "Bounds and sizes of the queues. They must be the same for all parts of a system."),
    Section("router", RouterSettings, "`jetwake router`."),
    Section(
        "worker", WorkerSettings, "`jetwake prefill`, `decode` and `aggregated`.", {"role": "a worker's role is the name of its command"}
    ),
    Section("engine", EngineSettings, "Which engine a worker runs."),
    Section(
        "vllm", VllmSettings, "The engine of kind vllm. Options of vLLM itself go into `engine_args`.", _ENGINE_NAMES, {"model": "any"}
    ),
    Section("simulated", SimulatedOptions, "The engine of kind simulated.", _ENGINE_NAMES),
    Section("gateway", GatewaySettings, "`jetwake gateway`: the OpenAI API.", {"batches": "batches have a section of their own"}),
    Section("batches", BatchSettings, "Batches that a gateway runs."),
    Section("telemetry", TelemetrySettings, "Metrics and logs of `jetwake router`, `prefill`, `decode`, `aggregated` and `gateway`."),
    Section("up", UpSettings, "`jetwake up`: a whole system on one machine."),
)
BY_NAME = {section.name: section for section in SECTIONS}


def variable(section: str, key: str) -> str:
    return f"{PREFIX}{section}_{key}".upper()


Values = Mapping[str, Mapping[str, Any]]
OriginKind = Literal["default", "file", "environment", "flag"]


@dataclass(frozen=True)
class Layer:
    """What one source says, by section and key. `flags`: which flag said it, by `section.key`."""

    kind: OriginKind
    values: Values
    source: str = ""
    flags: Mapping[str, str] = field(default_factory=dict[str, str])

    def origin(self, section: str, key: str) -> str:
        if self.kind == "flag":
            return self.flags[f"{section}.{key}"]
        return variable(section, key) if self.kind == "environment" else self.source

    def spelled(self, section: str, key: str) -> str:
        """A setting as this source writes it."""
        return variable(section, key) if self.kind == "environment" else f"{section}.{key}"

    def place(self, section: str, key: str) -> str:
        return variable(section, key) if self.kind == "environment" else f"{self.source}: {section}.{key}"


@dataclass(frozen=True)
class Configuration:
    """`layers`: the weakest first. `file`: the one that was read."""

    layers: tuple[Layer, ...] = ()
    file: Path | None = None

    def section(self, name: str) -> dict[str, Any]:
        """What is said of a section, without defaults: arguments for its model."""
        said: dict[str, Any] = {}
        for layer in self.layers:
            said |= layer.values.get(name, {})
        return said

    def layer_of(self, section: str, key: str) -> Layer | None:
        """Whose value counts; None: nobody says anything."""
        return next((layer for layer in reversed(self.layers) if key in layer.values.get(section, {})), None)

    def over(self, layer: Layer) -> "Configuration":
        return Configuration((*self.layers, layer), self.file)


NOTHING_CONFIGURED = Configuration()


def load(path: Path | None) -> Configuration:
    """The file (None: `jetwake.toml` in the working directory, if there is one) and the environment. Raises SetupError for all that is wrong."""
    if path is None and Path(FILE_NAME).is_file():
        path = Path(FILE_NAME)
    layers = [Layer("file", read_file(path), str(path))] if path is not None else []
    if any(name.startswith(PREFIX) for name in os.environ):
        layers.append(Layer("environment", read_environment(), "environment"))
    complaints = [complaint for layer in layers for complaint in complaints_about(layer)]
    if complaints:
        raise SetupError("; ".join(complaints))
    return Configuration(tuple(layers), path.absolute() if path is not None else None)


def read_file(path: Path) -> Values:
    """TOML, or YAML by its name. Raises SetupError."""
    try:
        text = path.read_text()
    except OSError as error:
        raise SetupError(f"the configuration file cannot be read: {error}") from error
    try:
        content = _yaml(text) if path.suffix in (".yaml", ".yml") else tomllib.loads(text)
    except ValueError as error:
        raise SetupError(f"{path}: {error}") from error
    stray = [key for key, value in content.items() if key in BY_NAME and not isinstance(value, dict)]
    if stray:
        raise SetupError(f"{path}: {stray[0]} is a section: its keys go under it")
    return {name: values if isinstance(values, dict) else {name: values} for name, values in content.items()}


def _yaml(text: str) -> dict[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    if not isinstance(content, dict):
        raise ValueError("a mapping of sections is expected")
    return {str(name): values if values is not None else {} for name, values in content.items()}


def read_environment() -> Values:
    """Raises SetupError. Lists and mappings are JSON there."""
    from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict, SettingsError

    class Base(BaseSettings):
        model_config = SettingsConfigDict(
            env_prefix=PREFIX, env_nested_delimiter="_", env_nested_max_split=1, env_parse_none_str="null", extra="ignore"
        )

    bare = next((name for section in SECTIONS if (name := f"{PREFIX}{section.name}".upper()) in os.environ), None)
    if bare is not None:
        raise SetupError(
            f"{bare} is no setting by itself: name a key of it, as in {bare}_{BY_NAME[bare[len(PREFIX) :].lower()].keys[0].upper()}"
        )
    fields: dict[str, Any] = {section.name: (section.model, ...) for section in SECTIONS}
    try:
        found = EnvSettingsSource(create_model("Environment", __base__=Base, **fields))()
    except SettingsError as error:
        raise SetupError(f"environment: {error}: {error.__cause__}") from error
    return {
        name: {key: value for key, value in values.items() if not _is_kubernetes(key, value)}
        for name, values in found.items()
        if isinstance(values, dict)
    }


def _is_kubernetes(key: str, value: object) -> bool:
    return bool(_KUBERNETES.search(key)) or (key.endswith("port") and str(value).startswith(("tcp://", "udp://")))


def complaints_about(layer: Layer) -> Iterator[str]:
    """One line for each thing that is wrong. What must be given for each process (a name) may be missing."""
    for name, values in layer.values.items():
        section = BY_NAME.get(name)
        if section is None:
            meant = _closest(name, list(BY_NAME))
            yield f"{layer.source}: there is no section {name}; " + (f"is {meant} meant?" if meant else f"there are: {', '.join(BY_NAME)}")
            continue
        for key in values:
            if key in section.apart:
                yield f"{layer.place(name, key)} cannot be set: {section.apart[key]}"
            elif key not in section.keys:
                yield f"{layer.place(name, key)} is not known; {_hint(layer, section, key)}"
        yield from _wrong_values(layer, section, {key: value for key, value in values.items() if key in section.keys})


def _wrong_values(layer: Layer, section: Section, values: Mapping[str, Any]) -> Iterator[str]:
    try:
        section.model(**section.stand_ins, **values)
    except ValidationError as error:
        for wrong in error.errors(include_url=False, include_input=False):
            if wrong["type"] != "missing":
                path = ".".join(str(part) for part in wrong["loc"])
                yield f"{layer.place(section.name, path) if path else f'{layer.source}: {section.name}'}: {wrong['msg']}"


def _hint(layer: Layer, section: Section, key: str) -> str:
    elsewhere = [layer.spelled(other.name, key) for other in SECTIONS if key in other.keys]
    meant = _closest(key, section.keys, 0.8 if elsewhere else 0.6)
    if meant or elsewhere:
        return f"is {layer.spelled(section.name, meant) if meant else ' or '.join(elsewhere)} meant?"
    if section.name == "vllm":
        return f"options of vLLM itself go into {layer.spelled('vllm', 'engine_args')}"
    return f"there are: {', '.join(sorted(section.keys))}"


def _closest(name: str, known: list[str], cutoff: float = 0.6) -> str:
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=cutoff)), "")


@dataclass(frozen=True)
class Effective:
    """One setting as it counts. `origin`: a file, a variable or a flag. `required`: it has no default, and nobody gave it yet."""

    section: str
    key: str
    value: Any
    kind: OriginKind
    origin: str
    required: bool = False


def effective(configuration: Configuration) -> Iterator[Effective]:
    for section in SECTIONS:
        for key in section.keys:
            info = section.model.model_fields[key]
            layer = configuration.layer_of(section.name, key)
            if layer is None:
                required = info.is_required()
                yield Effective(
                    section.name, key, None if required else info.get_default(call_default_factory=True), "default", "", required
                )
            else:
                value = TypeAdapter[Any](info.rebuild_annotation()).validate_python(layer.values[section.name][key])
                yield Effective(section.name, key, value, layer.kind, layer.origin(section.name, key))
