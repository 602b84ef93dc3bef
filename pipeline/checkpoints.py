"""Writes checkpoints of an answer (`jw.answers.<gateway>.<request>.<attempt>`): plain messages, each replacing the one before."""

import logging

from ..schemas import subjects
from ..schemas.errors import BusError
from ..schemas.replies import Checkpoint
from ..schemas.requests import InferenceRequest
from .publish import Publisher

logger = logging.getLogger(__name__)


async def announce(publisher: Publisher, request: InferenceRequest) -> None:
    """By whoever sent the request: from now on it can be found by its id. Without this, from its first checkpoint on."""
    try:
        await _send(publisher, request, 0, b"")
    except BusError as error:
        logger.warning("%s was sent but not announced: %s", request.request_id, error)


async def checkpoint(publisher: Publisher, request: InferenceRequest, tokens: bytes) -> None:
    """By whoever generates: all tokens of this attempt so far. Raises BusError."""
    await _send(publisher, request, request.attempt, tokens)


async def _send(publisher: Publisher, request: InferenceRequest, attempt: int, tokens: bytes) -> None:
    message = Checkpoint(
        request_id=request.request_id,
        model=request.model,
        attempt=attempt,
        tokens=tokens,
        text_rules=request.sampling.text_rules,
        deadline_ns=request.deadline_ns,
    )
    await publisher.send(subjects.answer(request.gateway, request.request_id, attempt), message)
