"""Keeps a gate's keys as they are in the broker, beside those of a file.

Reads `$KV.jw_keys.*` and the file. Promises: a key that was added or removed counts within a second, or within `LOOK_EVERY_S` when
the notice was lost; what cannot be read changes nothing.
"""

import asyncio
import logging
from pathlib import Path

from ...pipeline.connection import Bus
from ...pipeline.key_bucket import KeyBucket
from ...pipeline.publish import Publisher
from ...schemas.errors import BusError, Undecodable
from ...schemas.keys import ApiKey
from .gate import Gate
from .keyring import KeyFile, read_key_file

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 10.0
LOOK_AGAIN_S = 0.5


class KeyKeeper:
    """`open` first: then `gate` has all keys."""

    def __init__(self, bus: Bus, publisher: Publisher, file: Path | None, share: float) -> None:
        self._bus = bus
        self._bucket = KeyBucket(bus, publisher)
        self._file = file
        self._share = share
        self._kept: tuple[ApiKey, ...] = ()
        self._changed = asyncio.Event()
        self.gate = Gate()

    async def open(self) -> None:
        """Raises SetupError for the file, BusError and Undecodable for the bucket: a gateway that cannot know its keys must not open."""
        given = read_key_file(self._file) if self._file is not None else KeyFile(())
        self._kept = given.keys
        self.gate = Gate(given.secret or await self._bucket.secret(), self._share)
        await self._bucket.on_change(self._changed.set)
        await self._bus.flush()
        self.gate.use([*self._kept, *await self._bucket.all()])

    async def run(self) -> None:
        """Until cancelled."""
        look_in_s = LOOK_EVERY_S
        while True:
            try:
                async with asyncio.timeout(look_in_s):
                    await self._changed.wait()
            except TimeoutError:
                pass  # the usual case: nothing happened for this long
            # What was just changed may not be everywhere in a cluster: once more, soon.
            look_in_s = LOOK_AGAIN_S if self._changed.is_set() and self._bus.is_clustered else LOOK_EVERY_S
            self._changed.clear()
            await self._bus.wait_connected()
            try:
                self.gate.use([*self._kept, *await self._bucket.all()])
            except (BusError, Undecodable) as error:
                logger.warning("API keys not read, keeping those that are known: %s", error)
