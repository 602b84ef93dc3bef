"""What a worker counts of the legs it does, and says of them in spans: for all roles alike."""

from ..pipeline import instruments
from ..pipeline.tracing import Value
from ..schemas import signals
from ..schemas.prefill import PrefillJob
from ..schemas.signals import Attribute
from ..schemas.tokens import token_count
from .answer import Answer


def count_prefill(job: PrefillJob, cached_tokens: int) -> None:
    """A prompt is done. `cached_tokens`: of it, found in the cache of this worker."""
    model = job.request.model
    instruments.add(signals.PREFILL_PROMPT_TOKENS, job.request.prompt_length_tokens, model)
    instruments.add(signals.PREFILL_CACHED_TOKENS, cached_tokens, model)
    instruments.add(signals.PREFILL_PREDICTED_TOKENS, job.predicted_cached_tokens, model)


def count_transfer(model: str, size_bytes: int, transfer_s: float) -> None:
    if size_bytes:
        instruments.add(signals.TRANSFER_BYTES, size_bytes, model)
        instruments.record(signals.TRANSFER_DURATION, transfer_s, model)


def prompt_facts(job: PrefillJob, cached_tokens: int) -> dict[Attribute, Value]:
    return {
        signals.INPUT_TOKENS: job.request.prompt_length_tokens,
        signals.CACHED_TOKENS: cached_tokens,
        signals.PREDICTED_TOKENS: job.predicted_cached_tokens,
    }


def answer_facts(answer: Answer) -> dict[Attribute, Value]:
    reason = answer.last.finish_reason if answer.last is not None else None
    return {signals.OUTPUT_TOKENS: token_count(answer.tokens), **({signals.FINISH_REASONS: [reason]} if reason else {})}
