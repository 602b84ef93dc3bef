"""The bytes on the wire do not change unseen: each example encodes to the bytes kept in `golden.txt`, and those still decode.

A message that is new is added to `examples.py`, and `python tests/schemas/write_golden.py` writes the file anew. Bytes that
change for a message that was released need a new type tag instead.
"""

import importlib
import pkgutil

import pytest

import jetwake.schemas
from jetwake.schemas.codec import Message, decode, encode
from jetwake.schemas.json_schema import MESSAGES, type_tag

from .examples import BY_TAG
from .golden_file import read_golden

GOLDEN = read_golden()


@pytest.mark.parametrize("tag", sorted(BY_TAG))
def test_bytes_are_those_kept(tag: str) -> None:
    assert encode(BY_TAG[tag]).hex() == GOLDEN[tag].hex()


@pytest.mark.parametrize("tag", sorted(GOLDEN))
def test_kept_bytes_still_decode(tag: str) -> None:
    assert decode(GOLDEN[tag], type(BY_TAG[tag])) == BY_TAG[tag]


def test_nothing_is_left_out() -> None:
    assert set(GOLDEN) == set(BY_TAG) == {type_tag(message) for message in MESSAGES}


def test_examples_leave_nothing_at_its_default() -> None:
    """So that the bytes show every field. Terminals carry no field but those set; parallelism of KV is one wherever it is tested."""
    allowed = {"tensor_parallel", "pipeline_parallel", "context_parallel", "transfer_mode", "type"}
    for example in BY_TAG.values():
        unset = set(type(example).model_fields) - example.model_fields_set - allowed
        assert not unset, f"{type(example).__name__}: {unset}"


def test_every_typed_message_is_listed() -> None:
    """Found by importing all of `jetwake.schemas` and walking the subclasses of Message."""
    for module in pkgutil.iter_modules(jetwake.schemas.__path__):
        importlib.import_module(f"jetwake.schemas.{module.name}")
    found, todo = set[type[Message]](), [Message]
    while todo:
        for kind in todo.pop().__subclasses__():
            todo.append(kind)
            if "type" in kind.model_fields and kind.__module__.startswith("jetwake.schemas."):
                found.add(kind)
    assert found == set(MESSAGES)
