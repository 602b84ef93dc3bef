"""vLLM's `EngineClient` over the queue: what vLLM's server application takes for its engine. Imports vLLM.

A call of `generate` becomes one of our requests, or one for each of n answers: the first of them is sent alone, and the others
when its first token has come, so that the prompt is computed once and found in the cache by the rest. A client that goes away, or a
stop string that is found here, ends the requests at the workers too.
"""

from collections.abc import AsyncGenerator, Iterable, Mapping
from http import HTTPStatus
from typing import Any, NoReturn

from opentelemetry.trace import SpanKind
from vllm.config import ModelConfig, VllmConfig
from vllm.engine.protocol import EngineClient
from vllm.exceptions import GenerationError, VLLMClientError
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.renderers import BaseRenderer, renderer_from_config  # pyright: ignore[reportUnknownVariableType]
from vllm.renderers.inputs.preprocess import extract_prompt_components
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.tasks import SupportedTask
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor

from ...pipeline.tracing import Root
from ...schemas.errors import BrokerUnavailable, JetwakeError, RequestCancelled, RequestRefused
from ...schemas.requests import InferenceRequest
from ...schemas.timeline import Timeline
from ...schemas.tokens import pack_tokens
from .answers import Answers
from .exchange import Exchange, current
from .failures import Failure, failure_of
from .kept_streams import KeptStreams
from .metrics import GatewayMetrics
from .sampling import sampling_of
from .submission import Submitter

TASKS: tuple[SupportedTask, ...] = ("generate",)


class NotServed(GenerationError):
    """What vLLM's handlers see of a request that failed; the front tells the client the failure itself."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text)
        self.status_code = HTTPStatus(failure.status)


class BusEngine(EngineClient):
    def __init__(
        self,
        config: VllmConfig,
        submitter: Submitter,
        metrics: GatewayMetrics,
        request_timeout_s: float,
        kept: KeptStreams | None = None,
    ) -> None:
        self.vllm_config: VllmConfig = config
        self.model_config: ModelConfig = config.model_config
        self.renderer: BaseRenderer = renderer_from_config(config)  # pyright: ignore[reportUnknownVariableType]
        # A client's wish for them is ignored here (docs/openai.md), and a fast tokenizer (`fast_tokenizer`) answers it with an error.
        self.renderer._can_produce_offsets = lambda: False  # pyright: ignore[reportPrivateUsage]
        self.input_processor = InputProcessor(config, self.renderer)
        self._processor = OutputProcessor(self.renderer.tokenizer, log_stats=False)
        self._submitter = submitter
        self._metrics = metrics
        self._kept = kept
        self._timeout_ns = int(request_timeout_s * 1e9)

    # ------------------------------------------------------------------------------------------------------ requests

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        exchange = current()
        if exchange.streaming is not None and exchange.streaming.resumed is not None:
            return  # it is in work already
        refusal = self._submitter.refusal()
        if refusal is not None:
            self._refuse(exchange, refusal)

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        prompt_text: str | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        kv_hints: Any = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        exchange = current()
        answer = Answers(self._submitter, self._processor, exchange, self._kept)
        requests: list[InferenceRequest] = []
        code = RequestCancelled.code
        try:
            core = self._core_request(prompt, sampling_params, request_id, lora_request, tokenization_kwargs)
            text = prompt_text or extract_prompt_components(self.model_config, prompt).text
            requests = self._our_requests(exchange, core, session_id, priority, reasoning_ended, reasoning_parser_kwargs)
            self._note_kind(exchange, sampling_params)
            answer.take_quota(requests)
            answer.prepare(core, text, requests)
            async for output in answer.outputs():
                exchange.answering = True
                yield output
            code = ""
        except JetwakeError as error:
            self._refuse(exchange, error)
        except (VLLMClientError, ValueError, TypeError) as error:
            param = getattr(error, "parameter", None)
            exchange.failure = exchange.failure or Failure(400, "invalid_request", str(error), param=param)
            raise NotServed(exchange.failure) from error
        finally:
            given_tokens = answer.close()
            if requests:
                code = exchange.failure.code if exchange.failure is not None else code
                self._metrics.ended(requests[0].model, exchange.begun_monotonic_ns, requests[0].prompt_length_tokens, given_tokens, code)

    def _note_kind(self, exchange: Exchange, params: SamplingParams) -> None:
        """Only a stream of one answer can be resumed. Raises NotResumable."""
        if exchange.streaming is None:
            return
        if params.output_kind != RequestOutputKind.DELTA:
            exchange.streaming = None
        elif exchange.submitted > 1:
            exchange.streaming.exclude()

    def _core_request(
        self, prompt: Any, params: SamplingParams, request_id: str, lora: LoRARequest | None, tokenization: dict[str, Any] | None
    ) -> EngineCoreRequest:
        """vLLM's own view of the request: checked, with what the model's configuration adds. Raises VLLMClientError, ValueError."""
        core = self.input_processor.process_inputs(request_id, prompt, params, TASKS, lora_request=lora, tokenization_kwargs=tokenization)
        if core.prompt_token_ids is None or core.prompt_embeds is not None or core.mm_features:
            raise ValueError("only text prompts are served here: images, audio and embeddings are not")
        self.input_processor.assign_request_id(core)
        return core

    def _our_requests(
        self,
        exchange: Exchange,
        core: EngineCoreRequest,
        session: str | None,
        priority: int,
        reasoning_ended: bool | None,
        reasoning_options: dict[str, Any] | None,
    ) -> list[InferenceRequest]:
        """One for each of n answers. Raises InvalidRequest, PromptTooLong, PayloadTooLarge."""
        params = core.sampling_params
        assert params is not None
        now_ns = self._submitter.now_ns()
        sampling = sampling_of(params, params.seed, reasoning_ended, reasoning_options)
        first = InferenceRequest(
            request_id=exchange.next_request_id(),
            gateway=exchange.job.gateway if exchange.job is not None else self._submitter.gateway,
            model=self._submitter.model.model,
            # vLLM: lower is earlier. There are two classes here, and work that may wait is the batch class.
            priority_class=exchange.priority_class or ("batch" if priority > 0 else "interactive"),
            prompt_tokens=pack_tokens(core.prompt_token_ids or ()),
            sampling=sampling,
            lora=core.lora_request.lora_name if core.lora_request is not None else "",
            cache_salt=exchange.cache_salt,
            session=(session or "")[:256],
            submitted_ns=now_ns,
            times=Timeline(received_ns=self._submitter.at_ns(exchange.begun_monotonic_ns)),
            tenant=exchange.tenant,
            metadata=exchange.metadata,
            deadline_ns=self._deadline_ns(exchange, now_ns),
            # Nobody else would hear the answer; a stream that is resumed at another gateway is read there in place of this one.
            cancel_when_unread=exchange.job is None,
        )
        self._submitter.check(first)
        if exchange.root is None:
            exchange.root = Root(self._submitter.now_ns, first.times.received_ns, SpanKind.SERVER, exchange.trace_headers)
        first = exchange.root.carried_by(first)
        requests = [first]
        for number in range(1, params.n):
            seed = None if params.seed is None else params.seed + number
            own = {"request_id": exchange.next_request_id(), "sampling": sampling.model_copy(update={"seed": seed})}
            requests.append(first.model_copy(update=own))
        return requests

    def _deadline_ns(self, exchange: Exchange, now_ns: int) -> int:
        if exchange.job is not None:
            return exchange.job.deadline_ns
        wanted_ns = self._timeout_ns if exchange.timeout_s is None else int(exchange.timeout_s * 1e9)
        return now_ns + min(wanted_ns, self._timeout_ns)

    def _refuse(self, exchange: Exchange, error: JetwakeError) -> NoReturn:
        if isinstance(error, RequestRefused) and not exchange.answering:
            self._metrics.refused(error.code)
        exchange.failure = exchange.failure or failure_of(error, self._submitter.retry_after_s)
        raise NotServed(exchange.failure) from error

    # ------------------------------------------------------------------------------------------------------ state

    @property
    def is_running(self) -> bool:
        return True

    @property
    def is_stopped(self) -> bool:
        return False

    @property
    def errored(self) -> bool:
        return False

    @property
    def dead_error(self) -> BaseException:
        return BrokerUnavailable("the connection to the broker is lost")

    async def get_supported_tasks(self) -> tuple[SupportedTask, ...]:
        return TASKS

    async def check_health(self) -> None:
        if not self._submitter.connected:
            raise self.dead_error

    async def is_tracing_enabled(self) -> bool:
        return False

    async def do_log_stats(self) -> None:
        """There are none of an engine here."""

    async def is_sleeping(self) -> bool:
        return False

    async def is_paused(self) -> bool:
        return False

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Workers load adapters; here one is only a name."""
        return True

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Requests end when whoever iterates `generate` goes away."""

    def shutdown(self, timeout: float | None = None) -> None:
        self.renderer.shutdown()

    # ------------------------------------------------------------------------------------------------------ not here

    def encode(self, *_: Any, **__: Any) -> NoReturn:
        _not_here("encode")

    async def notify_kv_transfer_request_rejected(self, *_: Any, **__: Any) -> NoReturn:
        _not_here("notify_kv_transfer_request_rejected")

    async def start_profile(self, *_: Any, **__: Any) -> NoReturn:
        _not_here("start_profile")

    async def stop_profile(self) -> NoReturn:
        _not_here("stop_profile")

    async def reset_mm_cache(self) -> NoReturn:
        _not_here("reset_mm_cache")

    async def reset_encoder_cache(self) -> NoReturn:
        _not_here("reset_encoder_cache")

    async def reset_prefix_cache(self, *_: Any, **__: Any) -> NoReturn:
        _not_here("reset_prefix_cache")

    async def sleep(self, *_: Any, **__: Any) -> NoReturn:
        _not_here("sleep")

    async def release_kv_cache_memory(self) -> NoReturn:
        _not_here("release_kv_cache_memory")

    async def wake_up(self, *_: Any, **__: Any) -> NoReturn:
        _not_here("wake_up")

    async def pause_generation(self, *_: Any, **__: Any) -> NoReturn:
        _not_here("pause_generation")

    async def resume_generation(self) -> NoReturn:
        _not_here("resume_generation")


def _not_here(call: str) -> NoReturn:
    raise NotImplementedError(f"{call}: engines run in the workers, and a gateway has none")
