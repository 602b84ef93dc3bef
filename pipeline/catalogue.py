"""The models of this broker: what some worker announced once, in the bucket `jw_models`.

Reads and writes `$KV.jw_models.*`. Promises: a card that cannot be read hides no other; a model that is kept comes back within
seconds after the bucket was lost.
"""

import asyncio
import logging

from ..schemas.codec import decode, encode
from ..schemas.errors import BusError, Undecodable
from ..schemas.streams import MODELS_BUCKET
from ..schemas.subjects import model_token
from ..schemas.workers import ModelCard
from .connection import Bus
from .jetstream import SUBJECT_HEADER, bucket_stream, is_present, key_subject, last_message, last_messages
from .publish import Publisher

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 2.0


class ModelCatalogue:
    """Models that some worker announced once. They stay when the last worker goes, so that requests wait instead of being refused."""

    def __init__(self, bus: Bus, publisher: Publisher) -> None:
        self._bus = bus
        self._publisher = publisher

    async def put(self, card: ModelCard) -> None:
        await self._publisher.store_bytes(self._subject(card.model), encode(card))

    async def keep(self, card: ModelCard) -> None:
        """Until cancelled: announces it again when it is gone. One that another worker announced otherwise is left as it is."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            await self._bus.wait_connected()
            try:
                if await self.get(card.model) is None:
                    await self.put(card)
            except (BusError, Undecodable) as error:
                logger.warning("cannot look whether model %s is known: %s", card.model, error)

    async def get(self, model: str) -> ModelCard | None:
        message = await last_message(self._bus, bucket_stream(MODELS_BUCKET.name), self._subject(model))
        return decode(message.data, ModelCard) if message is not None and is_present(message) else None

    async def all(self) -> list[ModelCard]:
        """By name."""
        messages = await last_messages(self._bus, bucket_stream(MODELS_BUCKET.name), self._subject_of_all)
        cards: list[ModelCard] = []
        for message in messages:
            if is_present(message):
                try:
                    cards.append(decode(message.data, ModelCard))
                except Undecodable as error:
                    logger.warning("a model card cannot be read: %s: %s", message.headers.get(SUBJECT_HEADER, ""), error)
        return sorted(cards, key=lambda card: card.model)

    _subject_of_all = key_subject(MODELS_BUCKET.name, ">")

    @staticmethod
    def _subject(model: str) -> str:
        return key_subject(MODELS_BUCKET.name, model_token(model))
