"""API keys in the broker: `keys add`, `keys list`, `keys remove`."""

import json
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from .common import AsJson, Broker, run, say, takes_broker, topology_settings

if TYPE_CHECKING:
    from ...pipeline.key_bucket import KeyBucket

app = typer.Typer()

SHOWN = 12
"""Characters of a digest that name a key."""


@app.command()
@takes_broker
def add(
    tenant: Annotated[str, typer.Argument(help="On whose behalf it asks. Tenants share no cache.")],
    broker: Broker,
    priority_class: Annotated[str | None, typer.Option("--class", help="interactive or batch, of all its requests.")] = None,
    requests_per_minute: Annotated[int, typer.Option(min=0, help="0: no limit.")] = 0,
    tokens_per_minute: Annotated[int, typer.Option(min=0, help="Of prompts and answers together; 0: no limit.")] = 0,
    note: Annotated[str, typer.Option(help="For your own list.")] = "",
    as_json: AsJson = False,
) -> None:
    """Make a key for a tenant. It is shown once, and only its digest is kept."""

    async def body() -> None:
        from pydantic import ValidationError

        from ...schemas.codec import first_complaint
        from ...schemas.errors import SetupError
        from ...schemas.keys import ApiKey, key_digest

        key = f"jw-{secrets.token_urlsafe(32)}"
        try:
            made = ApiKey(
                digest=key_digest(key),
                tenant=tenant,
                priority_class=_priority_class(priority_class),
                requests_per_minute=requests_per_minute,
                tokens_per_minute=tokens_per_minute,
                note=note,
                created_ns=time.time_ns(),
            )
        except ValidationError as error:
            raise SetupError(first_complaint(error)) from error
        async with _bucket(broker) as bucket:
            await bucket.put(made)
        if as_json:
            print(json.dumps({"key": key, "id": made.digest[:SHOWN], "tenant": tenant}))
        else:
            say("This is the only time that the key is shown:")
            print(key)

    run(body)


@app.command(name="list")
@takes_broker
def list_keys(broker: Broker, as_json: AsJson = False) -> None:
    """The keys in the broker, by the beginning of their digests."""

    async def body() -> None:
        async with _bucket(broker) as bucket:
            keys = await bucket.all()
        if as_json:
            print(json.dumps([{**key.model_dump(exclude={"type", "digest"}), "id": key.digest[:SHOWN]} for key in keys]))
            return
        for key in keys:
            limits = f"{key.requests_per_minute or '-'} requests, {key.tokens_per_minute or '-'} tokens a minute"
            print(f"{key.digest[:SHOWN]}  {key.tenant}  {key.priority_class or 'any class'}  {limits}  {key.note}".rstrip())

    run(body)


@app.command()
@takes_broker
def remove(key: Annotated[str, typer.Argument(help="Its id from `keys list`, or the key itself.")], broker: Broker) -> None:
    """Take a key away; gateways refuse it within seconds."""

    async def body() -> None:
        from ...schemas.errors import SetupError
        from ...schemas.keys import key_digest

        async with _bucket(broker) as bucket:
            digest = key_digest(key)
            found = [known for known in await bucket.all() if known.digest == digest or (len(key) >= 6 and known.digest.startswith(key))]
            if len(found) != 1:
                raise SetupError(
                    "no such key: `jetwake keys list` shows their ids" if not found else "several keys begin so: give more of it"
                )
            await bucket.remove(found[0].digest)
        print(f"removed {found[0].digest[:SHOWN]} of {found[0].tenant}")

    run(body)


def _priority_class(given: str | None) -> Literal["interactive", "batch"] | None:
    from ...schemas.errors import SetupError

    if given in ("interactive", "batch", None):
        return given
    raise SetupError(f"--class is interactive or batch, not {given!r}")


@asynccontextmanager
async def _bucket(broker: Broker) -> "AsyncGenerator[KeyBucket]":
    from ...pipeline.connection import Bus
    from ...pipeline.key_bucket import KeyBucket
    from ...pipeline.publish import Publisher
    from ...pipeline.topology import restore_missing

    async with Bus.connect(broker.settings(), name="keys") as bus:
        await restore_missing(bus, topology_settings())
        yield KeyBucket(bus, Publisher(bus))
