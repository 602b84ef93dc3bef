"""Whether a command line that stands in a manifest is one that the product takes, with every option of an engine, a worker and a router."""

import functools
import re
from collections.abc import Sequence
from typing import Any

import typer

from jetwake.consumers.engine_vllm.settings import VllmSettings
from jetwake.deploy.cli import app
from jetwake.deploy.limits import topology_settings_of
from jetwake.deploy.options import parse_options
from jetwake.deploy.role_settings import router_settings, worker_settings


@functools.cache
def commands() -> dict[str, Any]:
    return typer.main.get_command(app).commands  # pyright: ignore[reportAttributeAccessIssue]


def parsed(words: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """The command and what it is given, as typer reads it. Raises what the command itself would refuse with."""
    name, *arguments = words
    given = commands()[name].make_context(name, list(arguments)).params
    _check_options(name, given)
    return name, given


def _check_options(name: str, given: dict[str, Any]) -> None:
    topology_settings_of(given.get("limit") or [])
    if name == "router":
        router_settings(_as_in_a_pod(given["name"]), given["policy"], given["router_option"] or [])
    elif name in ("prefill", "decode", "aggregated"):
        worker_settings(_as_in_a_pod(given["name"]), name, given["domain"], given["worker_option"] or [])
        options = parse_options(given["engine_option"] or [], "--engine-option")
        own = {key: value for key, value in options.items() if key in VllmSettings.model_fields}
        VllmSettings(model=given["model"], served_name=given["served_model_name"], **own)


def _as_in_a_pod(name: str) -> str:
    return re.sub(r"\$\((\w+)\)", "a-pod-7d9f8c6b5-abcde", name)
