"""The bounds of the queues, from a command line: every part of a system is given the same."""

from collections.abc import Sequence

from pydantic import ValidationError

from ..pipeline.settings import TopologySettings
from ..schemas.codec import first_complaint
from ..schemas.errors import SetupError
from .options import parse_options


def topology_settings_of(limits: Sequence[str]) -> TopologySettings:
    """`KEY=VALUE` pairs of TopologySettings. Raises SetupError naming what is wrong."""
    try:
        return TopologySettings(**parse_options(limits, "--limit"))
    except ValidationError as error:
        raise SetupError(f"--limit {first_complaint(error)}; there are: {', '.join(sorted(TopologySettings.model_fields))}") from error
