"""From options with several values to the configurations to replay: fleets times policies times blocks times profiles. Pure but for profile files."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from math import isfinite
from typing import Any

from ...producers.policies import KvAwareKnobs
from ...schemas.errors import SetupError
from .profiles import Profile, profile_named
from .replay_links import Link
from .replay_settings import ReplaySettings

GB = 1e9


@dataclass(frozen=True)
class FleetSize:
    """Either `aggregated` workers, or `prefill` and `decode` workers."""

    aggregated: int = 0
    prefill: int = 0
    decode: int = 0

    def __str__(self) -> str:
        return f"{self.aggregated} aggregated" if self.aggregated else f"{self.prefill} prefill + {self.decode} decode"

    @property
    def short(self) -> str:
        return f"{self.aggregated} aggregated" if self.aggregated else f"{self.prefill}P + {self.decode}D"


@dataclass(frozen=True)
class LinkOptions:
    """0 and None: as the profile knows them, else as `Link` has them."""

    gbytes_per_s: float = 0.0
    between_gbytes_per_s: float = 0.0
    latency_ms: float | None = None
    kv_bytes_per_token: int = 0
    domains: int = 1

    def link(self, profile: Profile) -> Link:
        """Raises SetupError."""
        default = Link()
        return Link(
            bytes_per_s=self.gbytes_per_s * GB or profile.link_bytes_per_s or default.bytes_per_s,
            latency_s=default.latency_s if self.latency_ms is None else self.latency_ms / 1e3,
            kv_bytes_per_token=self.kv_bytes_per_token or profile.kv_bytes_per_token or default.kv_bytes_per_token,
            domains=self.domains,
            between_bytes_per_s=self.between_gbytes_per_s * GB,
        )


@dataclass(frozen=True)
class GridOptions:
    """As given on the command line: values with commas between."""

    workers: str = ""
    prefill: str = ""
    decode: str = ""
    split: str = ""
    policy: str = "kv_aware"
    blocks: str = "16384"
    profile: str = "dynamo-default"
    block_size_tokens: int = 64
    decode_blocks: int = 0
    max_sequences: int = 256
    max_step_tokens: int = 8192
    event_lag_ms: float = 0.0
    knobs: Sequence[str] = ()
    link: LinkOptions = field(default_factory=LinkOptions)
    seed: int = 0


def configurations(options: GridOptions) -> list[ReplaySettings]:
    """In the order of the options. Raises SetupError."""
    knobs = knobs_of(options.knobs)
    return [
        settings_of(options, fleet, policy, blocks, profile, knobs)
        for profile, fleet, blocks, policy in product(
            profiles_of(options),
            fleets(options),
            _values(options.blocks, "--blocks"),
            _values(options.policy, "--policy"),
        )
    ]


def profiles_of(options: GridOptions) -> list[Profile]:
    """Raises SetupError."""
    return [profile_named(name) for name in _values(options.profile, "--profile")]


def settings_of(options: GridOptions, fleet: FleetSize, policy: str, blocks: str, profile: Profile, knobs: KvAwareKnobs) -> ReplaySettings:
    """Raises SetupError."""
    return ReplaySettings(
        aggregated=fleet.aggregated,
        prefill=fleet.prefill,
        decode=fleet.decode,
        policy=policy,
        knobs=knobs,
        block_size_tokens=options.block_size_tokens,
        blocks=profile.blocks(options.block_size_tokens) if blocks == "auto" else _whole(blocks, "--blocks", "a number, or auto"),
        decode_blocks=options.decode_blocks,
        timing=profile.timing,
        profile=profile.name,
        max_sequences=options.max_sequences,
        max_step_tokens=options.max_step_tokens,
        event_lag_s=options.event_lag_ms / 1e3,
        link=options.link.link(profile),
        seed=options.seed,
    )


def fleets(options: GridOptions) -> list[FleetSize]:
    """Raises SetupError."""
    found = [FleetSize(aggregated=_whole(value, "--workers")) for value in _values(options.workers, "--workers", least=0)]
    prefill, decode = _values(options.prefill, "--prefill", least=0), _values(options.decode, "--decode", least=0)
    if len(prefill) != len(decode):
        raise SetupError(f"--prefill and --decode go in pairs: {len(prefill)} and {len(decode)} values were given")
    pairs = [*zip(prefill, decode, strict=True), *(_pair(value) for value in _values(options.split, "--split", least=0))]
    found += [FleetSize(prefill=_whole(p, "--prefill"), decode=_whole(d, "--decode")) for p, d in pairs]
    if not found:
        raise SetupError("how many workers? give --workers 8, or --prefill 6 --decode 2, or --split 6:2,5:3")
    return found


def knobs_of(given: Sequence[str]) -> KvAwareKnobs:
    """KEY=VALUE each. Raises SetupError."""
    defaults = KvAwareKnobs()
    kinds = {one.name: type(getattr(defaults, one.name)) for one in fields(KvAwareKnobs)}
    changes = dict[str, float | int]()
    for item in given:
        key, equals, value = item.partition("=")
        if not equals or key not in kinds:
            raise SetupError(f"--knob takes KEY=VALUE with one of {', '.join(kinds)}; not {item!r}")
        try:
            changes[key] = kinds[key](value)
        except ValueError as error:
            raise SetupError(f"--knob {key} takes {'a whole number' if kinds[key] is int else 'a number'}, not {value!r}") from error
    return replace(defaults, **changes)


def label(settings: ReplaySettings, among: Sequence[ReplaySettings]) -> str:
    """Names it by what differs; always its workers or its policy."""
    parts = list(_differing(settings, among))
    return ", ".join(parts) or f"{fleet_of(settings).short}, {settings.policy}"


def described(settings: ReplaySettings) -> dict[str, Any]:
    """What was run, with knobs and link where they are not the usual."""
    usual, link = KvAwareKnobs(), settings.link
    own = {one.name: getattr(settings.knobs, one.name) for one in fields(KvAwareKnobs)}
    knobs = {name: value for name, value in own.items() if value != getattr(usual, name)}
    found = settings.described() | ({"knobs": knobs} if knobs else {})
    if settings.disaggregated and link != Link():
        found["link"] = {
            **({"gbytes_per_s": link.bytes_per_s / GB} if isfinite(link.bytes_per_s) else {}),
            **({"between_gbytes_per_s": link.between_bytes_per_s / GB} if link.between_bytes_per_s else {}),
            "latency_ms": link.latency_s * 1e3,
            "kv_bytes_per_token": link.kv_bytes_per_token,
            "domains": link.domains,
        }
    return found


def fleet_of(settings: ReplaySettings) -> FleetSize:
    return FleetSize(settings.aggregated, settings.prefill, settings.decode)


def _differing(settings: ReplaySettings, among: Sequence[ReplaySettings]) -> Iterator[str]:
    if len({fleet_of(other) for other in among}) > 1:
        yield fleet_of(settings).short
    if len({other.policy for other in among}) > 1:
        yield settings.policy
    if len({other.blocks for other in among}) > 1:
        yield f"{settings.blocks} blocks"
    if len({other.profile for other in among}) > 1:
        yield settings.profile


def _values(text: str, option: str, least: int = 1) -> list[str]:
    values = [value.strip() for value in text.split(",") if value.strip()]
    if len(values) < least:
        raise SetupError(f"{option} needs a value")
    return values


def _pair(value: str) -> tuple[str, str]:
    prefill, colon, decode = value.partition(":")
    if not colon:
        raise SetupError(f"--split takes PREFILL:DECODE pairs such as 6:2,5:3; not {value!r}")
    return prefill, decode


def _whole(value: str, option: str, kind: str = "whole numbers") -> int:
    if not value.isdigit() or not int(value):
        raise SetupError(f"{option} takes {kind} from 1 up, with commas between; not {value!r}")
    return int(value)
