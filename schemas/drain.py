"""Read by workers, routers and operators: the order to drain, that it was heard, and how the drain ended."""

from typing import Literal

from .codec import Message
from .requests import SafeToken


class DrainOrder(Message):
    """On `jw.drain.<name>`: take nothing new, finish or hand back what is in hand, and end."""

    type: Literal["drain_order"] = "drain_order"
    reason: str = ""


class DrainHeard(Message):
    """The answer to the order. `role` is a worker's role or `router`; `incarnation` is empty for routers."""

    type: Literal["drain_heard"] = "drain_heard"
    name: SafeToken
    role: str
    incarnation: str = ""


class Drained(Message):
    """On `jw.drained.<name>`, as its last word. `moved_requests`: handed back for others to do; `in_time`: nothing had to be cut short."""

    type: Literal["drained"] = "drained"
    name: SafeToken
    incarnation: str = ""
    in_time: bool = True
    moved_requests: int = 0
    took_s: float = 0.0
