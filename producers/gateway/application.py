"""vLLM's server application without an engine: its flags, its configuration, and the routes that can work here. Imports vLLM."""

import hashlib
import logging
import os
from argparse import Namespace
from pathlib import Path
from typing import Any, cast

from ...schemas.errors import SetupError
from ...schemas.workers import ModelCard
from .fast_tokenizer import use_fast_tokenizer
from .settings import GatewaySettings

SERVED_ROUTES = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/models",
        "/tokenize",
        "/detokenize",
        "/version",
    }
)
"""Everything else that vLLM's application offers needs an engine in this process, or belongs to the admin port."""
_MIDDLEWARE_NOT_USED = frozenset({"PrometheusInstrumentatorMiddleware", "ScalingMiddleware"})


def prepare_environment(source: str) -> None:
    """To be called before vLLM is imported: it reads these at import."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # How long a prompt may be is for the workers to say, whatever the model's configuration derives.
    os.environ.setdefault("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    if Path(source).is_dir():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")


def source_of(card: ModelCard, settings: GatewaySettings) -> str:
    """The folder or hub name whose tokenizer and configuration are used. Raises SetupError."""
    source = str(settings.tokenizer) if settings.tokenizer is not None else card.source
    if not source:
        raise SetupError(f"the workers of {card.model} have no tokenizer (simulated engines): give the folder of one with --tokenizer")
    if source.startswith(("/", ".", "~")) and not Path(source).expanduser().is_dir():
        raise SetupError(f"the model of {card.model} is in {source}, which is not on this machine: give its folder here with --tokenizer")
    return source


def parse_flags(card: ModelCard, source: str, settings: GatewaySettings) -> Namespace:
    """All of `vllm serve`; those of the engine are accepted and mean nothing here. An unknown one ends the program, as in vLLM."""
    from vllm.entrypoints.launchers import launcher
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser(prog="jetwake gateway"))
    own = ["--model", source, "--served-model-name", card.model, "--max-model-len", str(card.max_model_len_tokens)]
    own += ["--max-logprobs", str(card.max_logprobs), "--enable-prompt-tokens-details", "--disable-log-stats"]
    args: Any = parser.parse_args([*own, "--uvicorn-log-level", "warning", *settings.flags])
    args.enable_request_id_headers = False  # the front does it, for every response
    args.host, args.port = settings.host, settings.port
    try:
        validate_parsed_serve_args(args)
        if args.tool_parser_plugin:
            ToolParserManager.import_tool_parser(args.tool_parser_plugin)
        if args.reasoning_parser_plugin:
            ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)
        cast(Any, launcher).validate_api_server_args(args)
    except (ValueError, TypeError, KeyError) as error:
        raise SetupError(f"a flag of vLLM is wrong: {error.args[0] if error.args else error}") from error
    return args


def vllm_config(args: Namespace) -> Any:
    """What vLLM's front end asks of a configuration: the model, its tokenizer, and how structured output is checked."""
    from vllm import AsyncEngineArgs, envs
    from vllm.config import VllmConfig

    args.fast_tokenizer = use_fast_tokenizer(
        args.tokenizer or args.model, revision=args.tokenizer_revision, trust_remote_code=args.trust_remote_code
    )
    try:
        engine_args = AsyncEngineArgs.from_cli_args(args)
        model_config = engine_args.create_model_config()
        model_config.quantization = None  # no weights here
        envs.VLLM_CPU_KVCACHE_SPACE = 0  # and no cache
        structured = engine_args.create_structured_outputs_config()
        return VllmConfig(model_config=model_config, structured_outputs_config=structured, **_lora(args, model_config))
    except (ValueError, OSError, TypeError) as error:
        raise SetupError(f"vLLM's front end does not start with {args.model}: {error}") from error


def _lora(args: Namespace, model_config: Any) -> dict[str, Any]:
    """Adapters are names here; with any, vLLM's checks want to know that they are allowed."""
    from vllm.config import LoRAConfig

    if not (args.enable_lora or args.lora_modules):
        return {}
    config = LoRAConfig(max_loras=max(1, len(args.lora_modules or ())))
    config.verify_with_model_config(model_config)
    return {"lora_config": config}


def paths_by_token(app: Any) -> frozenset[str]:
    """Whose streamed events depend on how the tokens were cut: parsers of tools and reasoning say something of some, and not of others."""
    parsed = ("/v1/chat/completions",) if app.state.openai_serving_chat.parser_cls is not None else ()
    return frozenset({"/v1/messages", *parsed})


def rendering(card: ModelCard, settings: GatewaySettings, by_token: frozenset[str]) -> str:
    """The same for gateways that make the same events of the same tokens."""
    from vllm import __version__

    told = repr((__version__, card.model, settings.flags, sorted(by_token)))
    return hashlib.sha256(told.encode()).hexdigest()[:16]


async def build(engine: Any, args: Namespace) -> Any:
    """The FastAPI application, with only the routes that are served."""
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app

    from .short_way import shorten

    app = build_app(args, ("generate",), engine.model_config)
    await init_app_state(engine, app.state, args, ("generate",))
    app.router.routes[:] = list(served(app.router.routes))
    shorten(app)
    drop_unused_middleware(app)
    _hush_expected_failures()
    return app


def drop_unused_middleware(app: Any) -> None:
    """Also where the application has put its layers together already."""
    app.user_middleware[:] = [entry for entry in app.user_middleware if cast(type, entry.cls).__name__ not in _MIDDLEWARE_NOT_USED]
    app.middleware_stack = app.build_middleware_stack()


def served(routes: list[Any]) -> list[Any]:
    """The served routes, out of routers that newer versions of the framework nest."""
    found: list[Any] = []
    for route in routes:
        inner = getattr(route, "routes", None)
        if getattr(route, "path", None) in SERVED_ROUTES:
            found.append(route)
        elif inner and not getattr(route, "path", ""):
            found += served(inner)
    return found


def _hush_expected_failures() -> None:
    """vLLM logs a traceback for every request that fails; of one that was refused, the client is told, and that is all."""
    from .engine import NotServed

    class Hush(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            return not (record.exc_info and isinstance(record.exc_info[1], NotServed))

    for handler in logging.getLogger("vllm").handlers:
        handler.addFilter(Hush())
