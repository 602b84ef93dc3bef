"""`KEY=VALUE` pairs from a command line: the way to every option that has no flag of its own."""

import json
from collections.abc import Sequence
from typing import Any

from ..schemas.errors import SetupError


def parse_options(pairs: Sequence[str], flag: str) -> dict[str, Any]:
    """A value is JSON where it reads as such, text otherwise. Raises SetupError naming `flag`."""
    options: dict[str, Any] = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key:
            raise SetupError(f"{flag} takes KEY=VALUE, not {pair!r}")
        try:
            options[key.replace("-", "_")] = json.loads(value)
        except json.JSONDecodeError:
            options[key.replace("-", "_")] = value
    return options
