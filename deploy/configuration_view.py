"""Settings for readers: effective values with their origins and without secrets, and the reference page of all there are.

`python -m jetwake.deploy.cli config reference` writes docs/configuration.md; a test keeps the two equal.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from .configuration import FILE_NAME, FILE_VARIABLE, SECTIONS, Effective, Section, variable

MASK = "***"
UNITS = {
    "_s": "s", "_ms": "ms", "_us": "µs", "_bytes": "bytes", "_gib": "GiB", "_tokens": "tokens", "_blocks": "blocks", "_days": "days",
    "_share": "share",
}  # fmt: skip
_SECRET_NAME = re.compile(r"(?i)(secret|token|password|passphrase|api_?key|seed)$")
_USER_IN_URL = re.compile(r"(//)[^/@,\s]+@")

_INTRODUCTION = """# Configuration

<!-- Written by `jetwake config reference`; do not edit. -->

Every setting can be said in four places. The first that says something wins:

1. a flag of the command (`jetwake router --policy least_loaded`, or `--router-option hold_s=1` for keys without a flag of their own),
2. the environment (`JETWAKE_ROUTER_POLICY=least_loaded`): `JETWAKE_`, the section, the key; lists and mappings as JSON, `null` for none,
3. one file, TOML or YAML: `--config FILE`, else `{variable}`, else `{file}` in the working directory,
4. the default.

```toml
[nats]
url = "nats://nats-1:4222,nats://nats-2:4222"
credentials = "/etc/jetwake/worker.creds"

[router]
policy = "kv_aware"
hold_s = 1.0

[engine]
model = "Qwen/Qwen3-8B"

[vllm]
device = "cuda"
engine_args = {{ gpu_memory_utilization = 0.9 }}
```

A key that is not known is refused, with the nearest one that is. Relative paths are relative to the working directory. `jetwake up` gives its
file to every process that it starts. Variables that Kubernetes sets for services (`JETWAKE_GATEWAY_SERVICE_HOST`) are passed over.

    jetwake config check jetwake.toml                      # what is wrong in a file
    jetwake config show                                    # every value as it counts here, and where it comes from
    jetwake config show -- router --policy least_loaded    # the same, with the flags of a command

Secrets are not shown by `config show`: passwords in URLs, and what is named as one.
"""


def reference_page() -> str:
    parts = [_INTRODUCTION.format(variable=FILE_VARIABLE, file=FILE_NAME)]
    for section in SECTIONS:
        rows = [_row(section, key) for key in section.keys]
        parts.append(
            f"## {section.name}\n\n{section.about}\n\n| key | type | default | unit | meaning |\n|---|---|---|---|---|\n" + "\n".join(rows)
        )
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _row(section: Section, key: str) -> str:
    info = section.model.model_fields[key]
    default = "" if info.is_required() else _literal(info.get_default(call_default_factory=True))
    cells = [f"`{key}`", _type(info.annotation) + _bounds(info), f"`{default}`" if default else "", unit(key), info.description or ""]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def unit(key: str) -> str:
    return next((name for ending, name in UNITS.items() if key.endswith(ending)), "")


def _type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if arguments and NoneType in arguments:
        return " or ".join([_type(Union[tuple(kind for kind in arguments if kind is not NoneType)]), "none"])  # noqa: UP007
    if origin in (dict, Mapping):
        return "mapping"
    if origin in (list, tuple):
        return "list"
    names = {str: "text", int: "integer", float: "number", bool: "true or false", Path: "path"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _bounds(info: FieldInfo) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    found = [
        f"{sign} {getattr(rule, name):,}" for rule in info.metadata for name, sign in signs.items() if getattr(rule, name, None) is not None
    ]
    return f", {', '.join(found)}" if found else ""


def _literal(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, Path):
        return str(value)
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def masked(key: str, value: Any) -> Any:
    """Without what nobody else should read. A path to a secret is none."""
    if isinstance(value, Mapping):
        return {name: masked(str(name), inner) for name, inner in value.items()}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, str):
        return MASK if value and _SECRET_NAME.search(key) else _USER_IN_URL.sub(rf"\1{MASK}@", value)
    if isinstance(value, list | tuple):
        return [masked(key, inner) for inner in value]
    return value


def shown(rows: Iterator[Effective]) -> list[dict[str, Any]]:
    return [
        {
            "key": f"{row.section}.{row.key}",
            "value": masked(row.key, row.value),
            "origin": row.kind,
            "source": row.origin,
            "variable": variable(row.section, row.key),
            "required": row.required,
        }
        for row in rows
    ]


def print_shown(rows: list[dict[str, Any]], file: Path | None) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("setting", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("from", overflow="fold")
    for row in rows:
        value = "(for each process)" if row["required"] else _literal(row["value"])
        given = row["origin"] != "default"
        table.add_row(row["key"], value, row["source"] if given else "default", style=None if given else "dim")
    Console(highlight=False, markup=False).print(table)
    Console(highlight=False, stderr=True).print(f"configuration file: {file}" if file else "no configuration file")
