"""From command line options to an engine: the one place that knows which engines there are. Heavy imports happen on choice only."""

from typing import Any

from pydantic import ValidationError

from ..consumers.engine import Engine
from ..schemas.codec import first_complaint
from ..schemas.errors import SetupError
from .this_machine import AUTO, own_address

ENGINES = ("vllm", "simulated")
DEMO = "demo"


def make_engine(kind: str, model: str, served_model_name: str, options: dict[str, Any]) -> Engine:
    """Raises SetupError: an unknown engine or option, a missing extra, a model that is not there."""
    if options.get("side_channel_host") == AUTO:
        options = options | {"side_channel_host": own_address()}
    try:
        if kind == "simulated":
            return _simulated(served_model_name or model, options)
        if kind == "vllm":
            return _vllm(model, served_model_name or model, options)
    except ValidationError as error:
        raise SetupError(f"engine option {first_complaint(error)}") from error
    raise SetupError(f"no engine is called {kind!r}; there are {', '.join(ENGINES)}")


def _simulated(served_model_name: str, options: dict[str, Any]) -> Engine:
    from ..consumers.engine_simulated import SimulatedEngine, SimulatedSettings
    from .capacity.profiles import profile_named

    profile = profile_named(str(options.pop("timing", "zero"))).at_speed(float(options.pop("speed", 1.0)))
    return SimulatedEngine(SimulatedSettings(model=served_model_name, timing=profile.timing, **options))


def _vllm(model: str, served_model_name: str, options: dict[str, Any]) -> Engine:
    from ..consumers.engine_vllm.engine import VllmEngine
    from ..consumers.engine_vllm.settings import VllmSettings
    from .demo_model import fetch

    if model == DEMO:
        # Its weights were kept in 4 bits, and what is left of their margins is less than bfloat16 loses: in float32 the capital
        # of France is Paris.
        options.setdefault("dtype", "float32")
    own = {key: value for key, value in options.items() if key in VllmSettings.model_fields}
    engine_args = own.pop("engine_args", {}) | {key: value for key, value in options.items() if key not in VllmSettings.model_fields}
    settings = VllmSettings(model=str(fetch(model)), served_name=served_model_name, engine_args=engine_args, **own)
    return VllmEngine(settings)
