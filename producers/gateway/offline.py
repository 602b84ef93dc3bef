"""The gateway's application without a port: for programs that ask it from inside. Imports vLLM."""

from dataclasses import dataclass

from . import application
from .engine import BusEngine
from .front import Front
from .gate import Gate
from .metrics import GatewayMetrics
from .settings import GatewaySettings
from .submission import Submitter


@dataclass(frozen=True)
class Offline:
    """`names`: those of the models it answers for."""

    app: Front
    names: tuple[str, ...]
    engine: BusEngine

    def close(self) -> None:
        self.engine.shutdown()


async def open_offline(settings: GatewaySettings, submitter: Submitter) -> Offline:
    """Raises SetupError: a flag or a model that is wrong."""
    args = application.parse_flags(submitter.model, application.source_of(submitter.model, settings), settings)
    metrics = GatewayMetrics()
    engine = BusEngine(application.vllm_config(args), submitter, metrics, settings.request_timeout_s)
    args.api_key = None  # nobody but this process can ask
    app = await application.build(engine, args)
    names = (*args.served_model_name, *(module.name for module in args.lora_modules or ()))
    return Offline(Front(app, settings, metrics, application.SERVED_ROUTES, Gate()), names, engine)
