"""What the simulated engine computes instead of a model: pure functions of the token prefix.

A prefix has a 64-bit fingerprint: the chained block hash of its full blocks, then the same hash over the tokens of a part-full last
block. It stands for the KV cache (it fills the block's bytes) and gives the next token, which therefore depends on every token
before it, on what the root hash names (model, LoRA, salt), and with a temperature on the seed; without a seed, no two legs draw the
same. Probabilities are made up, but always the same. An engine without a tokenizer writes its token numbers, `<17><4>`, and sees
stop strings in them; what else needs text is refused.
"""

import secrets
from dataclasses import dataclass

import xxhash

from ..schemas.blocks import block_count, block_hashes, root_hash
from ..schemas.decode import KvReference
from ..schemas.errors import EngineRefused, HandoffRefused, Undecodable
from ..schemas.replies import PositionLogprobs
from ..schemas.requests import Sampling
from ..schemas.tokens import largest_token, unpack_tokens
from .engine import FinishReason, Leg

_digest = xxhash.xxh3_64_intdigest


@dataclass(frozen=True)
class Limits:
    """What a model and its cache can take; `model` is the name clients use, and part of the root of all hashes."""

    model: str
    vocabulary_size: int
    max_model_len_tokens: int
    block_size_tokens: int
    eos_token_id: int | None
    seed: int
    writes_numbers: bool = True


class TokenSequence:
    """A growing token sequence with the fingerprints of its blocks."""

    def __init__(self, tokens: bytes, block_size_tokens: int, root: int) -> None:
        self.num_tokens = len(tokens) // 4
        self.full_hashes = block_hashes(tokens, block_size_tokens, root)
        self._block_bytes = 4 * block_size_tokens
        self.root = root
        self._tail = tokens[len(self.full_hashes) * self._block_bytes :]

    def fingerprint(self) -> int:
        parent = self.full_hashes[-1] if self.full_hashes else self.root
        return _digest(self._tail, parent) if self._tail else parent

    def block_fingerprints(self) -> list[int]:
        """What each block holds, a part-full last one included."""
        return [*self.full_hashes, self.fingerprint()] if self._tail else self.full_hashes

    def append(self, token: int) -> bool:
        """Whether the token made its block full."""
        self._tail += token.to_bytes(4, "little")
        self.num_tokens += 1
        if len(self._tail) < self._block_bytes:
            return False
        self.full_hashes.append(self.fingerprint())
        self._tail = b""
        return True


class Answer:
    """Draws one answer, token by token, and knows when and why it ends."""

    def __init__(self, leg: Leg, sequence: TokenSequence, limits: Limits) -> None:
        self.sequence = sequence
        self.num_drawn = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason = ""
        self._sampling = leg.sampling
        self._limits = limits
        self._forced = unpack_tokens(leg.forced_tokens)
        self._stops = frozenset(leg.sampling.stop_token_ids)
        self._endings = self._stops if leg.sampling.ignore_eos or limits.eos_token_id is None else self._stops | {limits.eos_token_id}
        self._text = ""
        self._seed = b"" if leg.sampling.temperature == 0 else str((limits.seed, _seed_of(leg.sampling))).encode()

    def draw(self) -> tuple[int, bool]:
        """The next token, and whether it made its block full."""
        token = self._forced[self.num_drawn] if self.num_drawn < len(self._forced) else self._choose()
        self.num_drawn += 1
        filled = self.sequence.append(token)
        self._see_end(token)
        return token, filled

    def logprobs(self, token: int) -> PositionLogprobs:
        """Of the token just drawn; as many alternatives as were asked for, the drawn one being the likeliest."""
        count = max(self._sampling.logprobs or 0, 1)
        unit = (_digest(token.to_bytes(4, "little"), self.sequence.num_tokens) % 1000 + 1) / 1000
        others = [(token + step) % self._limits.vocabulary_size for step in range(1, count)]
        values = [-unit * (step + 1) for step in range(len(others) + 1)]
        return PositionLogprobs(token_ids=[token, *others], logprobs=values, ranks=list(range(1, len(values) + 1)))

    def _choose(self) -> int:
        fingerprint = self.sequence.fingerprint()
        choice = _digest(self._seed, fingerprint)
        allowed = self._sampling.allowed_token_ids
        banned = self._endings if self.num_drawn < self._sampling.min_tokens else frozenset[int]()
        size = len(allowed) or self._limits.vocabulary_size
        for step in range(size):
            index = (choice + step) % size
            token = allowed[index] if allowed else index
            if token not in banned:
                return token
        raise EngineRefused("min_tokens forbids every token that may be drawn")

    def _see_end(self, token: int) -> None:
        if token in self._endings:
            self.finish_reason = "stop"
            self.stop_reason = str(token) if token in self._stops else ""
        elif stop := self._stop_string(token):
            self.finish_reason, self.stop_reason = "stop", stop
        elif self.num_drawn >= self._sampling.max_tokens or self.sequence.num_tokens >= self._limits.max_model_len_tokens:
            self.finish_reason = "length"

    def _stop_string(self, token: int) -> str:
        """The one that the text now has, if any."""
        if not self._sampling.stop:
            return ""
        self._text += f"<{token}>"
        return next((stop for stop in self._sampling.stop if stop in self._text), "") if self.num_drawn > self._sampling.min_tokens else ""


def _seed_of(sampling: Sampling) -> int | str:
    return secrets.token_hex(8) if sampling.seed is None else sampling.seed


def begin(leg: Leg, limits: Limits) -> Answer:
    """Raises EngineRefused when the leg is no request this engine can run."""
    try:
        largest = max(largest_token(leg.prompt_tokens), largest_token(leg.forced_tokens))
    except Undecodable as error:
        raise EngineRefused(str(error)) from error
    length = len(leg.prompt_tokens) // 4
    if not 0 < length < limits.max_model_len_tokens:
        raise EngineRefused(f"a prompt must have 1 to {limits.max_model_len_tokens - 1} tokens, this one has {length}")
    if largest >= limits.vocabulary_size:
        raise EngineRefused(f"token id {largest} is not below the vocabulary size {limits.vocabulary_size}")
    _refuse_text(leg.sampling, limits)
    root = root_hash(limits.model, leg.lora, leg.cache_salt)
    return Answer(leg, TokenSequence(leg.prompt_tokens, limits.block_size_tokens, root), limits)


def _refuse_text(sampling: Sampling, limits: Limits) -> None:
    for name, given in (
        ("stop", sampling.stop if not limits.writes_numbers else []),
        ("bad_words", sampling.bad_words),
        ("structured_output", sampling.structured_output),
    ):
        if given:
            raise EngineRefused(f"the simulated engine has no tokenizer: {name} needs one")


def check_handoff(kv: KvReference, prompt_tokens: int, block_size_tokens: int, own_engine_id: str) -> list[int]:
    """The remote blocks, in prompt order. Raises HandoffRefused for a reference that cannot be that of this prompt."""
    if kv.engine_id == own_engine_id:
        raise HandoffRefused("the KV cache is in this engine itself")
    if kv.num_tokens != prompt_tokens:
        raise HandoffRefused(f"the handoff is for {kv.num_tokens} tokens, the prompt has {prompt_tokens}")
    if kv.block_size_tokens != block_size_tokens:
        raise HandoffRefused(f"blocks of {kv.block_size_tokens} tokens; this engine's have {block_size_tokens}")
    if (kv.tensor_parallel, kv.pipeline_parallel, kv.context_parallel, kv.transfer_mode) != (1, 1, 1, "pull"):
        raise HandoffRefused("the simulated engine pulls from engines without parallelism only")
    expected = block_count(prompt_tokens, block_size_tokens)
    if len(kv.block_ids) != 1 or len(kv.block_ids[0]) != expected:
        raise HandoffRefused(f"{kv.held_blocks} blocks in {len(kv.block_ids)} groups, expected {expected} in one")
    return kv.block_ids[0]
