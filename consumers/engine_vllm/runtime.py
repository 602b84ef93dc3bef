"""vLLM's AsyncLLM behind our own types: the one module that makes and calls it.

Imported inside `VllmEngine.start()`, after the environment is set, and never before: vLLM reads the environment at import. Every
exception of vLLM leaves this module as one of `schemas.errors`.
"""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Awaitable, Generator, Sequence
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Any, cast

from vllm.config import KVEventsConfig, KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMError
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from ...schemas.errors import EngineDead, EngineRefused, SetupError
from ...schemas.replies import PositionLogprobs
from ...schemas.tokens import unpack_tokens
from ..engine import Leg
from . import sampling
from .load import LoadRecord, load_record
from .settings import VllmSettings, engine_arguments, unknown_arguments

if TYPE_CHECKING:
    from vllm.logprobs import Logprob
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams

LIVENESS_POLL_S = 0.25


@dataclasses.dataclass(frozen=True)
class Step:
    """New tokens of one leg. `finish_reason` is vLLM's: stop, length, abort or error."""

    tokens: list[int]
    logprobs: list[PositionLogprobs]
    finish_reason: str | None
    stop_reason: str
    cached_tokens: int
    kv_transfer_params: dict[str, Any] | None


class _StoppedExplicitly(AsyncLLM):
    """Without the parent's shutdown on collection, which comes too late, or at exit, and then fails."""

    def __del__(self) -> None:
        """`VllmEngine.stop` has ended it; where nobody could, the processes die with this one."""


class Runtime:
    def __init__(self, settings: VllmSettings, llm: AsyncLLM) -> None:
        self._settings = settings
        self._llm = llm
        self._stopped = False
        self._loras = {name: LoRARequest(name, number, path) for number, (name, path) in enumerate(settings.lora_adapters.items(), 1)}
        self.load = load_record(llm)

    @classmethod
    def build(cls, settings: VllmSettings, engine_id: str) -> "Runtime":
        """Blocks until the model is loaded. Raises SetupError."""
        arguments = engine_arguments(settings, engine_id)
        unknown_arguments(arguments, frozenset(field.name for field in dataclasses.fields(AsyncEngineArgs)))
        # Config objects are made from plain mappings here, so that settings need not import vLLM.
        try:
            arguments["kv_transfer_config"] = KVTransferConfig(**arguments["kv_transfer_config"])
            if "kv_events_config" in arguments:
                arguments["kv_events_config"] = KVEventsConfig(**arguments["kv_events_config"])
            arguments.setdefault("disable_log_stats", True)
            llm = _StoppedExplicitly.from_engine_args(AsyncEngineArgs(**arguments), stat_loggers=[LoadRecord])
        except (VLLMError, ValueError, TypeError, AssertionError, OSError, RuntimeError, ImportError) as error:
            raise SetupError(f"vLLM does not start with {settings.model}: {error}") from error
        return cls(settings, llm)

    @property
    def dead(self) -> bool:
        return self._stopped or self._llm.errored

    @property
    def config(self) -> Any:
        """vLLM's whole configuration, after it filled in what was left open."""
        return self._llm.vllm_config

    def first_token(self, leg: Leg, kv_transfer_params: dict[str, Any]) -> AsyncGenerator[Step, None]:
        with _translated(self._llm):
            # Refused here rather than on the decode leg, when the client already has its first token.
            sampling.for_answer(leg.sampling, [], None)
            params = sampling.for_first_token(leg.sampling, unpack_tokens(leg.forced_tokens), kv_transfer_params)
        return self._submit(leg, params)

    def answer(self, leg: Leg, kv_transfer_params: dict[str, Any] | None) -> AsyncGenerator[Step, None]:
        with _translated(self._llm):
            params = sampling.for_answer(leg.sampling, unpack_tokens(leg.forced_tokens), kv_transfer_params)
        return self._submit(leg, params)

    async def _submit(self, leg: Leg, params: "SamplingParams") -> AsyncGenerator[Step, None]:
        prompt = tokens_input(unpack_tokens(leg.prompt_tokens), cache_salt=leg.cache_salt or None)
        with _translated(self._llm):
            outputs = self._llm.generate(
                prompt, params, leg.engine_request_id, lora_request=self._lora(leg.lora), **sampling.reasoning(leg.sampling)
            )
            async with aclosing(outputs):
                async for output in outputs:
                    yield _step(output)

    def _lora(self, name: str) -> LoRARequest | None:
        if not name:
            return None
        if name not in self._loras:
            raise EngineRefused(f"this engine has no adapter {name!r}; it has {', '.join(self._loras) or 'none'}")
        return self._loras[name]

    async def call(self, method: str, *args: object, timeout_s: float | None = None) -> list[Any]:
        """One answer from each rank. Raises EngineDead, also when there is no answer in time."""
        if self.dead:
            raise EngineDead("the engine's processes have ended")
        # vLLM leaves the type of the answers open.
        answers = cast("Awaitable[list[Any]]", self._llm.collective_rpc(method, args=args))  # pyright: ignore[reportUnknownMemberType]
        asked = asyncio.ensure_future(answers)
        limit_s = timeout_s or self._settings.call_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                # vLLM forgets open calls when its processes die.
                while not (await asyncio.wait({asked}, timeout=LIVENESS_POLL_S))[0]:
                    if self.dead:
                        raise EngineDead("the engine's processes have ended")
        except TimeoutError as error:
            raise EngineDead(f"the engine did not answer {method} within {limit_s} s") from error
        finally:
            asked.cancel()
        with _translated(self._llm):
            return asked.result()

    async def reset_prefix_cache(self) -> bool:
        """False when blocks are in use or held."""
        with _translated(self._llm):
            return await self._llm.reset_prefix_cache()

    def fail_legs(self) -> None:
        """Everything in hand raises EngineDead; called on the event loop, before `shutdown`."""
        self._stopped = True
        # It would log the end that is intended here as a failure.
        handler = cast("asyncio.Task[None] | None", self._llm.output_handler)  # pyright: ignore[reportUnknownMemberType]
        if handler is not None:
            handler.cancel()
        self._llm.output_processor.propagate_error(EngineDeadError())

    def shutdown(self, timeout_s: float) -> None:
        """Blocks."""
        self._llm.shutdown(timeout=timeout_s)


@contextmanager
def _translated(llm: AsyncLLM) -> Generator[None]:
    """vLLM's exceptions as ours. Whatever ends one request leaves the engine alive; EngineDeadError is the exception to that."""
    try:
        yield
    except EngineDeadError as error:
        raise EngineDead("the engine's processes have ended") from error
    except EngineGenerateError as error:
        if llm.errored:
            raise EngineDead("the engine's processes have ended") from error
        raise EngineRefused(f"the engine failed on this request: {error.__cause__ or error}") from error
    except (VLLMError, ValueError, TypeError, NotImplementedError) as error:
        raise EngineRefused(str(error)) from error


def _step(output: "RequestOutput") -> Step:
    completion = output.outputs[0]
    tokens = list(completion.token_ids)
    # Without the flat form, which we never ask for, these are plain mappings by token id.
    positions = cast("Sequence[dict[int, Logprob]]", completion.logprobs or ())
    return Step(
        tokens=tokens,
        logprobs=[_position(token, alternatives) for token, alternatives in zip(tokens, positions, strict=True)] if positions else [],
        finish_reason=completion.finish_reason,
        stop_reason="" if completion.stop_reason is None else str(completion.stop_reason),
        cached_tokens=output.num_cached_tokens or 0,
        kv_transfer_params=output.kv_transfer_params,
    )


def _position(drawn: int, alternatives: "dict[int, Logprob]") -> PositionLogprobs:
    others = sorted((token for token in alternatives if token != drawn), key=lambda token: alternatives[token].rank or 0)
    ids = [drawn, *others]
    return PositionLogprobs(
        token_ids=ids,
        logprobs=[alternatives[token].logprob for token in ids],
        ranks=[alternatives[token].rank or 0 for token in ids],
    )
