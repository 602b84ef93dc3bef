"""The JSON Schemas say what the models say, and every example obeys its schema."""

import json
from typing import Any

import pytest

from jetwake.schemas.json_schema import documents, files

from .examples import BY_TAG


def test_one_for_each_message() -> None:
    assert set(documents()) == set(BY_TAG)
    assert set(files()) == {f"{tag}.schema.json" for tag in (*BY_TAG, "request_ended")}


@pytest.mark.parametrize("tag", sorted(BY_TAG))
def test_fields_and_bytes(tag: str) -> None:
    document: dict[str, Any] = json.loads(files()[f"{tag}.schema.json"])
    example = BY_TAG[tag]
    assert set(document["properties"]) == set(type(example).model_fields)
    assert document["properties"]["type"]["const"] == tag
    for name, value in example:
        if isinstance(value, bytes):
            assert document["properties"][name]["format"] == "binary"
            assert document["properties"][name]["description"]
    assert document["description"]
