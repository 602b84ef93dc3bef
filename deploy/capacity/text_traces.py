"""Requests from texts: conversations (ShareGPT-like) and OpenAI batch lines. What is alike in their prompts is found here. Pure.

Prompts are cut into stretches of tokens, or without a tokenizer of characters, four for a token; equal stretches that stand behind
equal stretches get one content id. Texts are joined as they are, each behind its role: no chat template is applied.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, cast

import xxhash

from ...schemas.errors import SetupError
from ...schemas.tokens import pack_tokens
from .trace import Trace, TraceRequest

CHARACTERS_PER_TOKEN = 4
HUMAN = ("human", "user")


@dataclass(frozen=True)
class TextOptions:
    """`rate_per_s`: of Poisson arrivals; without it all requests come at once. `turn_gap_s`: between the turns of a conversation, on average.

    `encode`: the tokenizer; without it lengths are estimates. `output_tokens`: where the file does not say how long an answer is.
    """

    rate_per_s: float | None = None
    turn_gap_s: float = 30.0
    seed: int = 0
    encode: Callable[[str], Sequence[int]] | None = None
    output_tokens: int = 256
    stretch_tokens: int = 64

    def __post_init__(self) -> None:
        """Raises SetupError."""
        for option, value in (("--rate", self.rate_per_s), ("--output-tokens", self.output_tokens)):
            if value is not None and value <= 0:
                raise SetupError(f"{option} must be above 0, not {value}")


@dataclass(frozen=True, slots=True)
class _Turn:
    session: str
    turn: int
    input_tokens: int
    content: tuple[int, ...]
    output_tokens: int


def read_conversations(name: str, objects: Iterable[tuple[str, dict[str, Any]]], options: TextOptions) -> Trace:
    """Each turn of the human is a request: all before it is its prompt, and what follows is its answer."""
    prompts, turns = _Prompts(options), list[_Turn]()
    for number, (where, item) in enumerate(objects, 1):
        session = str(item.get("id", number))
        said = _messages(where, item.get("conversations"), "conversations", "from", "value")
        text, asked = "", 0
        for place, (role, words) in enumerate(said):
            text += f"{role}\n{words}\n"
            if role in HUMAN:
                answer = said[place + 1][1] if place + 1 < len(said) and said[place + 1][0] not in HUMAN else ""
                output_tokens = prompts.count(answer) if answer else options.output_tokens
                turns.append(_Turn(session, asked, *prompts.read(text), output_tokens))
                asked += 1
    return _trace(name, turns, options)


def read_batch(name: str, objects: Iterable[tuple[str, dict[str, Any]]], options: TextOptions) -> Trace:
    """Each line is a request: chat messages or a prompt. Its answer is as long as it allows."""
    prompts, turns = _Prompts(options), list[_Turn]()
    for where, line in objects:
        body = line.get("body")
        if not isinstance(body, dict):
            raise SetupError(f'{where}: body must be an object, that of the request: {{"custom_id": ..., "body": {{...}}}}')
        if "messages" in body:
            said = _messages(where, body["messages"], "body.messages", "role", "content")
            length, content = prompts.read("".join(f"{role}\n{words}\n" for role, words in said))
        else:
            length, content = prompts.read(_batch_prompt(where, body.get("prompt")))
        limit = body.get("max_completion_tokens", body.get("max_tokens"))
        if limit is not None and (type(limit) is not int or limit < 1):
            raise SetupError(f"{where}: max_tokens must be a whole number, at least 1, not {limit!r}")
        turns.append(_Turn("", 0, length, content, limit or options.output_tokens))
    return _trace(name, turns, options)


def _batch_prompt(where: str, prompt: Any) -> str | list[int]:
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(type(token) is int and 0 <= token < 2**32 for token in prompt):
        return prompt
    raise SetupError(f"{where}: body must have messages, or a prompt that is one text or one list of token ids")


def _messages(where: str, given: Any, key: str, role_key: str, text_key: str) -> list[tuple[str, str]]:
    if not isinstance(given, list):
        raise SetupError(f'{where}: {key} must be a list of {{"{role_key}": ..., "{text_key}": ...}}, not {type(given).__name__}')
    return [(str(_field(where, one, key, role_key)), _text(where, _field(where, one, key, text_key))) for one in given]


def _field(where: str, message: Any, key: str, name: str) -> Any:
    if not isinstance(message, dict) or name not in message:
        raise SetupError(f'{where}: a message of {key} has no "{name}"')
    return message[name]


def _text(where: str, content: Any) -> str:
    """That of a message: a text, nothing, or a list of parts, of which the texts count."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        return "\n".join(str(part["text"]) for part in content if "text" in part)
    raise SetupError(f"{where}: a message's text must be a string or a list of parts, not {type(content).__name__}")


class _Prompts:
    """Gives prompts their lengths and content ids, numbered as they first come."""

    def __init__(self, options: TextOptions) -> None:
        self._encode = options.encode
        self._stretch_tokens = options.stretch_tokens
        self._ids: dict[tuple[int, bytes], int] = {}

    def count(self, text: str) -> int:
        return len(self._encode(text)) if self._encode else max(1, round(len(text) / CHARACTERS_PER_TOKEN))

    def read(self, prompt: str | Sequence[int]) -> tuple[int, tuple[int, ...]]:
        """Its tokens and content. An empty prompt is one token long: an engine is never asked for nothing."""
        if isinstance(prompt, str) and self._encode is None:
            size = self._stretch_tokens * CHARACTERS_PER_TOKEN
            texts = (prompt[start : start + size] for start in range(0, max(1, len(prompt)), size))
            return max(1, -(-len(prompt) // CHARACTERS_PER_TOKEN)), tuple(self._named(text.encode() for text in texts))
        tokens = self._encode(prompt) if isinstance(prompt, str) and self._encode else prompt
        packed, size = pack_tokens(cast(Sequence[int], tokens)), 4 * self._stretch_tokens
        stretches = (packed[start : start + size] for start in range(0, max(1, len(packed)), size))
        return max(1, len(tokens)), tuple(self._named(stretches))

    def _named(self, stretches: Iterable[bytes]) -> Iterator[int]:
        parent = -1
        for stretch in stretches:
            parent = self._ids.setdefault((parent, xxhash.xxh3_128_digest(stretch)), len(self._ids))
            yield parent


def _trace(name: str, turns: Sequence[_Turn], options: TextOptions) -> Trace:
    if not turns:
        raise SetupError(f"{name} has no requests: no turn is from {' or '.join(HUMAN)}")
    requests = [
        TraceRequest(at_s, turn.input_tokens, turn.output_tokens, turn.content, turn.session)
        for at_s, turn in zip(_times_s(turns, options), turns, strict=True)
    ]
    notes = ["arrivals at once" if options.rate_per_s is None else f"Poisson arrivals at {options.rate_per_s:g}/s: the file has no times"]
    if options.encode is None:
        notes.append(f"lengths are estimates, {CHARACTERS_PER_TOKEN} characters for a token: name a tokenizer for better ones")
    return Trace(name, options.stretch_tokens, tuple(sorted(requests, key=lambda request: request.at_s)), tuple(notes))


def _times_s(turns: Sequence[_Turn], options: TextOptions) -> list[float]:
    """Conversations begin as a Poisson process, so often that requests come at the rate asked for; their turns follow at random gaps."""
    if options.rate_per_s is None:
        return [0.0] * len(turns)
    random, begin_s, at_s, times = Random(options.seed), 0.0, 0.0, list[float]()
    beginnings = sum(turn.turn == 0 for turn in turns)
    for turn in turns:
        if turn.turn == 0:
            begin_s += random.expovariate(options.rate_per_s * beginnings / len(turns))
            at_s = begin_s
        else:
            at_s += random.expovariate(1 / options.turn_gap_s)
        times.append(round(at_s, 6))
    return times
