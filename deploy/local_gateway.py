"""The gateway of a local system: its port, its process, and the tokenizer that lets simulated engines speak words."""

import asyncio
import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..pipeline.reserved_port import ReservedPort
from ..schemas.errors import SetupError
from .demo_model import fetch

DEFAULT_PORT = 8000
STAND_IN = "tiny"
"""Whose tokenizer simulated engines get when their model is only a name."""


@dataclass(frozen=True)
class LocalGateway:
    """`flags`: those of `vllm serve`, as given. The port is kept until its process listens on it, and while it is started again."""

    reserved: ReservedPort
    flags: tuple[str, ...] = ()

    @property
    def port(self) -> int:
        return self.reserved.port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def arguments(self, model: str, ready_file: Path) -> list[str]:
        """The command line of its process."""
        own = ["gateway", "--name", "gateway-1", "--model", model, "--port", str(self.port), "--ready-file", str(ready_file)]
        return [*own, *self.flags]


def local_gateway(engine: str, port: int | None, wanted: bool, flags: Sequence[str] = ()) -> LocalGateway | None:
    """None when none is wanted: with simulated engines only one that was asked for is. Raises SetupError when it cannot run."""
    if not wanted or (port is None and engine != "vllm"):
        if flags:
            raise SetupError(f"{' '.join(flags)}: flags of the gateway, and there is none; give --port")
        return None
    if importlib.util.find_spec("vllm") is None:
        raise SetupError('the OpenAI API needs vLLM\'s front end: install "jetwake[cpu]", or give --no-gateway')
    return LocalGateway(reserved_port(DEFAULT_PORT if port is None else port), tuple(flags))


def reserved_port(port: int) -> ReservedPort:
    """The port itself, or a free one for 0. Raises SetupError when it is taken."""
    try:
        return ReservedPort("127.0.0.1", port)
    except OSError as error:
        raise SetupError(f"port {port} is taken: give the OpenAI API another with --port (0: any free one)") from error


def engine_options_for(flags: Sequence[str], engine: str, model: str, given: Mapping[str, Any]) -> list[str]:
    """What the workers must know so that a gateway with these flags can work: engine options to add to those given."""
    known = dict(given)
    if engine == "vllm":
        parser = flag_value(flags, "--reasoning-parser")
        return [f"reasoning_parser={parser}"] if parser and "reasoning_parser" not in known else []
    added: list[str] = []
    if "tokenizer" not in known:
        named = model in ("demo", "tiny") or Path(model).expanduser().is_dir()
        known["tokenizer"] = str(fetch(model if named else STAND_IN))
        added.append(f"tokenizer={known['tokenizer']}")
    if "vocabulary_size" not in known:
        added.append(f"vocabulary_size={_vocabulary_size(Path(str(known['tokenizer'])))}")
    return added


def flag_value(flags: Sequence[str], name: str) -> str:
    """Of `--name value` or `--name=value`; empty when it is not there."""
    for position, flag in enumerate(flags):
        if flag == name and position + 1 < len(flags):
            return flags[position + 1]
        if flag.startswith(f"{name}="):
            return flag.partition("=")[2]
    return ""


async def admin_url(ready_file: Path) -> str:
    """Where its metrics, health and live page are, as soon as it serves."""
    while not (ready_file.exists() and (text := ready_file.read_text())):
        await asyncio.sleep(0.05)
    return str(json.loads(text)["admin_url"])


def _vocabulary_size(folder: Path) -> int:
    """An engine must not draw a token that the tokenizer does not have."""
    from tokenizers import Tokenizer

    try:
        tokens: int = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    except Exception as error:  # `tokenizers` raises nothing narrower
        raise SetupError(f"{folder} has no tokenizer.json and config.json to use: {error}") from error
    return min(tokens, int(config.get("vocab_size", tokens)))
