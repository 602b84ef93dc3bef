"""Names from outside cannot leave their place in a subject, and no two of them meet there."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from jetwake.schemas import subjects
from jetwake.schemas.requests import SafeToken

HOSTILE = [
    "a.b",
    "a_b",
    "*",
    ">",
    "x y",
    "../../etc",
    "%2e%2e",
    "a\r\nb",
    "a\rb",
    "a\nb",
    "\0",
    "$JS.API.>",
    "",
    " ",
    "_",
    "ü",
    "模型",
    "e\u0301",
    "\u00e9",
    "\ud800",
    "🙂",
    "m" * 80,
    "m" * 81,
    "m" * 5000,
    "m" * 5001,
    "org/model",
    "org.model",
    "ORG/model",
]
SAFE = re.compile(r"[A-Za-z0-9_-]{1,80}\Z")


def test_hostile_names_are_safe_and_distinct() -> None:
    tokens = [subjects.model_token(name) for name in HOSTILE]
    assert all(SAFE.match(token) for token in tokens)
    assert len(set(tokens)) == len(HOSTILE)


@given(st.text(max_size=200), st.text(max_size=200))
def test_any_names_are_safe_and_distinct(one: str, two: str) -> None:
    assert SAFE.match(subjects.model_token(one))
    assert (subjects.model_token(one) == subjects.model_token(two)) == (one == two)


def test_a_token_is_not_the_token_of_its_token() -> None:
    """Somebody may name a model just as another model's token reads."""
    token = subjects.model_token("a.b")
    assert subjects.model_token(token) != token


def test_plain_names_stay_readable() -> None:
    assert subjects.model_token("SmolLM2-135M_Instruct") == "SmolLM2-135M_Instruct"
    assert subjects.model_token("org/SmolLM2").startswith("org_SmolLM2-")


@pytest.mark.parametrize("name", [name for name in HOSTILE if not re.fullmatch(r"[A-Za-z0-9_-]{1,96}", name)] + ["a\n", "m" * 97])
def test_hostile_names_are_no_safe_tokens(name: str) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(SafeToken).validate_python(name)


def test_subjects_have_the_tokens_they_should() -> None:
    for name in HOSTILE:
        assert subjects.requests(name, "batch").count(".") == 3
        assert subjects.result(name, "gw", "req").count(".") == 4
