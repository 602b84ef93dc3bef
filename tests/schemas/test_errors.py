"""The error tree: codes are unique, and the tree that is drawn is the tree that is."""

import inspect
import re

from jetwake.schemas import errors
from jetwake.schemas.errors import JetwakeError, Overloaded, RequestFailed

KINDS = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, JetwakeError)]


def test_codes_are_unique_and_stable_in_form() -> None:
    codes = [kind.code for kind in KINDS]
    assert len(set(codes)) == len(codes)
    assert all(re.fullmatch(r"[a-z][a-z_]*", code) for code in codes)
    assert all("code" in vars(kind) for kind in KINDS)


def test_the_drawing_shows_every_class_under_its_parent() -> None:
    """Four columns of drawing for each level."""
    drawn, path = dict[str, str](), list[str]()
    for line in (errors.__doc__ or "").splitlines():
        if found := re.match(r"([ │├└─]*)([A-Z][A-Za-z]+)(\s|$)", line):
            depth = len(found[1]) // 4
            path[depth:] = [found[2]]
            drawn[found[2]] = path[depth - 1] if depth else "Exception"
    drawn = {name: parent for name, parent in drawn.items() if hasattr(errors, name)}
    assert drawn == {kind.__name__: kind.__base__.__name__ for kind in KINDS if kind.__base__}


def test_those_that_carry_more() -> None:
    assert Overloaded("full", retry_after_s=2.5).retry_after_s == 2.5
    assert RequestFailed("text", reply_code="pull_failed").reply_code == "pull_failed"
    assert str(Overloaded("full")) == "full"
