"""Whether the user of a process may do what its role does, tried at the broker as it is. Nothing is stored, taken or changed by that.

What is published names a place in its stream that cannot be, so the broker refuses to store it, after it looked whether the user may
publish. Not tried: what others would hear (`jw.cancel`, cards), take (queue groups), or what would make or remove something.
"""

import asyncio
from collections.abc import Iterable
from typing import get_args

from ...pipeline.connection import Bus, RawMessage
from ...pipeline.permissions import Role, published, rights, subscribed
from ...schemas import streams
from ...schemas.errors import BusError, NotPermitted
from .finding import Finding

WHAT = "permissions"
QUIET = (streams.REQUESTS, streams.PREFILL, streams.HANDOFF, streams.CLAIMS, streams.RESULTS, streams.BATCH_LINES)
"""Nobody listens there but through the stream."""
READING = ("STREAM.INFO.", "STREAM.NAMES", "STREAM.LIST", "CONSUMER.INFO.", "CONSUMER.LIST.", "DIRECT.GET.")
IMPOSSIBLE = {"Nats-Expected-Last-Sequence": str(1 << 62)}
ANSWER_S = 1.0


async def permissions(bus: Bus, role: str) -> Finding:
    """`role` is one that has users."""
    given = rights(next(known for known in get_args(Role) if known == role), bus.settings.name or "doctor")
    asked = [subject for subject in map(concrete, published(given)) if is_harmless(subject)]
    heard = [subject for subject in subscribed(given) if " " not in subject and not subject.startswith("_INBOX.")]
    refused = [f"publish to {subject}" for subject in await _refused_publishes(bus, asked)]
    refused += [f"hear {subject}" for subject in await _refused_subscriptions(bus, heard)]
    if refused:
        more = f" and {len(refused) - 4} more" if len(refused) > 4 else ""
        cure = f"run it as a user of the role {role}: `jetwake nats permissions` makes one, and its .env says which variables to set"
        return Finding(WHAT, "wrong", f"this user may not {', '.join(refused[:4])}{more}", cure)
    return Finding(WHAT, "ok", f"what {role} does is allowed ({len(asked) + len(heard)} subjects tried)")


def has_users(role: str) -> bool:
    return role in get_args(Role)


def concrete(pattern: str) -> str:
    """A subject that the pattern takes in, and that nobody uses."""
    return pattern.replace("*", "doctor").replace(">", "doctor")


def is_harmless(subject: str) -> bool:
    path = subject.removeprefix("$JS.API.")
    if path != subject:
        return path.startswith(READING)
    tokens = subject.split(".")
    return any(_takes(pattern.split("."), tokens) for spec in QUIET for pattern in spec.subjects)


def _takes(pattern: list[str], tokens: list[str]) -> bool:
    return len(pattern) == len(tokens) and all(mine in ("*", token) for mine, token in zip(pattern, tokens, strict=True))


async def _refused_publishes(bus: Bus, subjects: Iterable[str]) -> list[str]:
    async def is_refused(subject: str) -> bool:
        try:
            await bus.request(subject, b"", None if subject.startswith("$") else IMPOSSIBLE, timeout_s=ANSWER_S)
        except NotPermitted:
            return True
        except BusError:
            return False  # the broker was asked, and has nothing there: that is a matter for other checks
        return False

    wanted = list(subjects)
    return [subject for subject, refused in zip(wanted, await asyncio.gather(*map(is_refused, wanted)), strict=True) if refused]


async def _refused_subscriptions(bus: Bus, subjects: Iterable[str]) -> list[str]:
    def ignore(message: RawMessage) -> None:
        pass

    refused: list[str] = []
    for subject in subjects:
        subscription = await bus.subscribe(subject, ignore)
        try:
            await bus.flush()
        except NotPermitted:
            refused.append(subject)
        finally:
            await subscription.unsubscribe()
    return refused
