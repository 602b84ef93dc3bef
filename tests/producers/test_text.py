"""Stop strings and split characters, whatever the chunking."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jetwake.producers.text import NumberCodec, TextStream, TokenizerCodec, held_back


def bytes_codec() -> TokenizerCodec:
    """Every token is one byte of UTF-8: the worst case for split characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return TokenizerCodec(tokenizer, "", {})


CODEC = bytes_codec()


def shown(text: str, stop: list[str], sizes: list[int], include_stop: bool = False) -> list[str]:
    token_ids, stream, pieces = CODEC.encode(text), TextStream(CODEC, stop, include_stop, True), list[str]()
    while token_ids:
        size = sizes.pop(0) if sizes else 1
        pieces.append(stream.add(token_ids[:size]))
        token_ids = token_ids[size:]
    pieces.append(stream.finish())
    assert "".join(pieces) == stream.text
    return pieces


@given(text=st.text(alphabet="aé한😀b STOP", max_size=40), sizes=st.lists(st.integers(1, 7), max_size=40))
def test_text_is_whole_whatever_the_chunks(text: str, sizes: list[int]) -> None:
    assert "".join(shown(text, [], sizes)) == text


@given(
    text=st.text(alphabet="ab한S", max_size=30), stop=st.text(alphabet="ab한S", min_size=1, max_size=4), sizes=st.lists(st.integers(1, 5))
)
def test_nothing_of_a_stop_string_is_ever_shown(text: str, stop: str, sizes: list[int]) -> None:
    pieces = shown(text, [stop], sizes)
    at = text.find(stop)
    assert "".join(pieces) == (text if at < 0 else text[:at])


def test_a_stop_string_is_kept_when_asked_for() -> None:
    assert "".join(shown("one STOP two", ["STOP"], [3], include_stop=True)) == "one STOP"


def test_the_earliest_of_two_stop_strings_ends_the_text() -> None:
    assert "".join(shown("x b a", ["a", "b"], [50])) == "x "


@pytest.mark.parametrize(("text", "stops", "count"), [("hello ST", ["STOP"], 2), ("hello", ["STOP"], 0), ("aSTO", ["STOP", "TOE"], 3)])
def test_held_back(text: str, stops: list[str], count: int) -> None:
    assert held_back(text, stops) == count


def test_an_incomplete_last_character_is_shown_as_the_tokenizer_renders_it() -> None:
    stream = TextStream(CODEC, [], False, True)
    assert stream.add(CODEC.encode("a한")[:3]) == "a"
    assert stream.finish() == "\N{REPLACEMENT CHARACTER}"


def test_numbers_stand_for_the_tokens_of_an_engine_without_words() -> None:
    stream = TextStream(NumberCodec(), [], False, True)
    assert stream.add([1, 22]) == "<1><22>"
