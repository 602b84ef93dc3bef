"""Read by workers and by `jetwake probe`: a link between two workers is to be measured, and what was measured."""

from typing import Literal

from pydantic import Field

from .codec import Message
from .requests import SafeToken


class LinkProbe(Message):
    """On `jw.probe.<worker>`. `open`: lay out a buffer for others to read; `pull`: read that of `engine_id` at `host`:`port`; `close`: free it.

    `pattern` is what the buffer is filled with and compared with. `force`: also when there is work in hand.
    """

    type: Literal["link_probe"] = "link_probe"
    step: Literal["open", "pull", "close"]
    probe: SafeToken
    pattern: int = Field(default=0, ge=0, lt=1 << 32)
    force: bool = False
    host: str = ""
    port: int = Field(default=0, ge=0, le=65535)
    engine_id: str = ""


class SizePulled(Message):
    """Reads of one size, in the order in which they were made."""

    size_bytes: int = Field(ge=1)
    took_us: list[int]


class LinkProbed(Message):
    """The answer. `refused`: why nothing was done, `broken`: why the bytes did not come; empty where all went well."""

    type: Literal["link_probed"] = "link_probed"
    worker: SafeToken
    refused: str = ""
    broken: str = ""
    host: str = ""
    port: int = 0
    engine_id: str = ""
    connect_us: int = 0
    sizes: list[SizePulled] = Field(default=[])
