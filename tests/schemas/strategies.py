"""Hypothesis strategies made from the models themselves: any message that validation accepts and the wire can carry."""

import types
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from hypothesis import strategies as st
from pydantic import StringConstraints

from jetwake.schemas.codec import Message

TEXT_CHARACTERS = st.characters(exclude_categories=["Cs"])


def messages(kind: type[Message]) -> st.SearchStrategy[Message]:
    """With any subset of the fields that have a default."""
    required = {name: _field(kind, name) for name, field in kind.model_fields.items() if field.is_required()}
    optional = {name: _field(kind, name) for name, field in kind.model_fields.items() if not field.is_required()}
    return st.fixed_dictionaries(required, optional=optional).map(lambda values: kind(**values))


def _field(kind: type[Message], name: str) -> st.SearchStrategy[Any]:
    field = kind.model_fields[name]
    return _values(field.annotation, field.metadata)


def _values(annotation: Any, metadata: Sequence[Any] = ()) -> st.SearchStrategy[Any]:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _values(arguments[0], [*arguments[1:], *metadata])
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin in (Union, types.UnionType):
        return st.one_of([_values(argument, metadata) for argument in arguments])
    if origin is list:
        return st.lists(_values(arguments[0]), max_size=4)
    if origin is dict:
        return st.dictionaries(_values(arguments[0]), _values(arguments[1]), max_size=4)
    if isinstance(annotation, type) and issubclass(annotation, Message):
        return messages(annotation)
    return _plain(annotation, metadata)


def _plain(annotation: Any, metadata: Sequence[Any]) -> st.SearchStrategy[Any]:
    bounds = _bounds(metadata)
    if annotation is str:
        pattern = next((limit.pattern for limit in metadata if isinstance(limit, StringConstraints)), None)
        if pattern is not None:
            return st.from_regex(str(pattern).replace("$", r"\Z"))
        size = {"max_size": 20} | {key: bounds[key] for key in ("min_size", "max_size") if key in bounds}
        return st.text(TEXT_CHARACTERS, **size)
    if annotation is int:
        least = bounds.get("min_value", -(2**63)) + bounds.get("exclude_min", False)
        return st.integers(least, bounds.get("max_value", 2**63 - 1) - bounds.get("exclude_max", False))
    if annotation is float:
        floats = {key: bounds[key] for key in ("min_value", "max_value", "exclude_min", "exclude_max") if key in bounds}
        return st.floats(allow_nan=False, **floats)
    return {bool: st.booleans(), bytes: st.binary(max_size=40), type(None): st.none()}[annotation]


def _bounds(metadata: Sequence[Any]) -> dict[str, Any]:
    bounds = dict[str, Any]()
    for limit in metadata:
        match limit:
            case Ge(value):
                bounds["min_value"] = value
            case Gt(value):
                bounds |= {"min_value": value, "exclude_min": True}
            case Le(value):
                bounds["max_value"] = value
            case Lt(value):
                bounds |= {"max_value": value, "exclude_max": True}
            case MinLen(value):
                bounds["min_size"] = value
            case MaxLen(value):
                bounds["max_size"] = value
            case _:
                pass
    return bounds
