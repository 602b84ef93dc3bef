"""Text to tokens and back, on the side of whoever asks: engines and the wire speak token ids only.

Light on purpose (`tokenizers` and `jinja2`, no torch), so that any asyncio program can hold a client. `TextStream` owns split
characters and stop strings: nothing of a stop string is ever shown, not even a part that turns out to be its beginning.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from ..schemas.errors import InvalidRequest, SetupError

ChatMessage = Mapping[str, Any]


class TextCodec(Protocol):
    """Turns prompts into token ids and token ids into text."""

    def encode(self, text: str) -> list[int]: ...

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Raises InvalidRequest when the model has no chat template or the template refuses the messages."""
        ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str: ...

    def stream(self, skip_special_tokens: bool) -> "TokenStream": ...


class TokenStream(Protocol):
    def step(self, token_id: int) -> str:
        """The text this token completes: empty while a character is incomplete."""
        ...


def load_text_codec(source: str) -> TextCodec:
    """The tokenizer of a model folder or hub name; numbers in place of words for an engine without one (empty source)."""
    if not source:
        return NumberCodec()
    folder = Path(source) if Path(source).is_dir() else _from_hub(source)
    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # `tokenizers` raises nothing narrower
        raise SetupError(f"cannot load the tokenizer of {source!r}: {error}") from error
    return TokenizerCodec(tokenizer, _read_chat_template(folder), _special_tokens(folder))


class TokenizerCodec:
    def __init__(self, tokenizer: Tokenizer, chat_template: str, special_tokens: Mapping[str, str]) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._special_tokens = special_tokens

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        if not self._chat_template:
            raise InvalidRequest("this model has no chat template: send the prompt as text (`--raw`)")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        try:
            template = environment.from_string(self._chat_template, globals={"raise_exception": _refuse})
            text = template.render(messages=list(messages), add_generation_prompt=True, **self._special_tokens)
        except TemplateError as error:
            raise InvalidRequest(f"the chat template refused the messages: {error}") from error
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def stream(self, skip_special_tokens: bool) -> TokenStream:
        return _TokenizerStream(self._tokenizer, skip_special_tokens)


class _TokenizerStream:
    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)

    def step(self, token_id: int) -> str:
        return self._stream.step(self._tokenizer, token_id) or ""


class NumberCodec:
    """For the simulated engine, which has no words: prompts are their UTF-8 bytes, answers the ids as numbers."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        return self.encode("\n".join(f"{message['role']}: {message['content']}" for message in messages))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        return "".join(self.step(token_id) for token_id in token_ids)

    def stream(self, skip_special_tokens: bool) -> TokenStream:
        return self

    def step(self, token_id: int) -> str:
        return f"<{token_id}>"


class TextStream:
    """Token ids in, text that may be shown out. `add` holds back whatever could still become a stop string."""

    def __init__(self, codec: TextCodec, stop: Sequence[str], include_stop: bool, skip_special_tokens: bool) -> None:
        self._codec = codec
        self._stop = stop
        self._include_stop = include_stop
        self._skip_special_tokens = skip_special_tokens
        self._stream = codec.stream(skip_special_tokens)
        self._token_ids: list[int] = []
        self._text = ""
        self._shown = 0
        self._stopped = False

    @property
    def text(self) -> str:
        """All text shown so far."""
        return self._text[: self._shown]

    def add(self, token_ids: Sequence[int]) -> str:
        self._token_ids.extend(token_ids)
        if self._stopped:
            return ""
        self._text += "".join(self._stream.step(token_id) for token_id in token_ids)
        end = self._cut_at_stop()
        return self._show(len(self._text) - held_back(self._text, self._stop) if end is None else end)

    def finish(self) -> str:
        """The rest: what was held back and, as the tokenizer renders it, a last character that never became whole."""
        if self._stopped:
            return ""
        whole = self._codec.decode(self._token_ids, self._skip_special_tokens)
        if whole.startswith(self._text):
            self._text = whole
        end = self._cut_at_stop()
        return self._show(len(self._text) if end is None else end)

    def _cut_at_stop(self) -> int | None:
        """Where the text ends when a stop string is in it."""
        found = [(at, len(stop)) for stop in self._stop if (at := self._text.find(stop)) >= 0]
        if not found:
            return None
        self._stopped = True
        at, length = min(found)
        return at + length if self._include_stop else at

    def _show(self, end: int) -> str:
        end = max(end, self._shown)
        piece, self._shown = self._text[self._shown : end], end
        return piece


def held_back(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of `text` are the beginning of a stop string."""
    longest = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest


def _refuse(text: str) -> None:
    raise TemplateError(text)


def _from_hub(name: str) -> Path:
    """The tokenizer files of a hub model, from the local cache or the hub. Raises SetupError."""
    from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]  # slow to import, and local folders need none of it

    try:
        fetch = cast(Callable[..., str], snapshot_download)
        return Path(fetch(name, allow_patterns=["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]))
    except (OSError, ValueError) as error:  # the hub's own errors are of these kinds
        raise SetupError(f"cannot fetch the tokenizer of {name!r}: {error}") from error


def _read_chat_template(folder: Path) -> str:
    separate = folder / "chat_template.jinja"
    if separate.is_file():
        return separate.read_text()
    template = _tokenizer_config(folder).get("chat_template")
    return template if isinstance(template, str) else ""


def _special_tokens(folder: Path) -> dict[str, str]:
    config = _tokenizer_config(folder)
    named: dict[str, str] = {}
    for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(key)
        if isinstance(value, dict):
            value = cast(dict[str, object], value).get("content")
        if isinstance(value, str):
            named[key] = value
    return named


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    return json.loads(path.read_text()) if path.is_file() else {}
