"""What a vLLM engine needs to know, and the only place where a device matters.

Reads nothing and does nothing at import. `environment()` is what must stand in the process environment before vLLM is imported
(its children inherit it); `engine_arguments()` is what vLLM's engine is built with. A CPU in a laptop and a GPU in a cluster differ
in these values and nowhere else.
"""

import ipaddress
import json
import os
import socket
import tempfile
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from ...pipeline.reserved_port import ReservedPort
from ...schemas.errors import SetupError
from .plugin import OWNER_VARIABLE, PROGRESS_DELAY_VARIABLE, SPIN_VARIABLE

CONNECTOR = "NixlConnector"
LEASE_KEEPER = "jetwake.consumers.engine_vllm.lease_keeper.LeaseKeeper"
FORCED_TOKENS = "jetwake.consumers.engine_vllm.forced_tokens:ForcedTokens"

OWN_ARGUMENTS = frozenset({"kv_transfer_config", "kv_events_config", "worker_extension_cls", "logits_processors", "skip_tokenizer_init"})
"""Options of vLLM that this engine sets itself; given by a user they would undo what the contract promises."""


class VllmSettings(BaseModel):
    """One engine. An unknown key fails at once; an option that vLLM does not know fails at start, by name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(description="a folder, or a name on the model hub")
    served_name: str = Field(default="", description="what clients call it; empty: the name of the model")
    revision: str = Field(default="", description="revision on the hub; for a folder, a digest of its weights is used")
    dtype: str = Field(default="auto", description="of the weights, as vLLM names them")
    max_model_len: int = Field(default=4096, ge=2, description="tokens of a prompt and its answer together")
    block_size: int = Field(default=32, ge=1, description="tokens of one KV block; must be equal in a pool")
    max_num_seqs: int = Field(default=16, ge=1, description="requests that one step may carry")
    max_num_batched_tokens: int | None = Field(default=None, ge=1, description="tokens that one step may carry; None: vLLM decides")
    tensor_parallel: int = Field(default=1, ge=1, description="GPUs that share one engine")

    device: Literal["cpu", "cuda"] = Field(default="cpu", description="cpu or cuda")
    kv_cache_gib: int = Field(default=1, ge=1, description="CPU only: size of the KV cache; vLLM would take nearly all memory")
    kv_buffer_device: Literal["cpu", "cuda"] | None = Field(
        default=None, description="where NIXL reads and writes; None: the device itself"
    )
    omp_threads: int = Field(default=2, ge=1, description="CPU only: threads of one engine; with passive waiting engines may share cores")
    omp_binding: str = Field(default="nobind", description="CPU only: VLLM_CPU_OMP_THREADS_BIND; nobind lets several engines share cores")
    omp_wait_policy: Literal["passive", "active"] = Field(default="passive", description="CPU only: passive threads sleep between loops")
    step_spin_s: float | None = Field(default=0.001, ge=0, description="processes of an engine spin this long for a message; None: 1 s")
    enforce_eager: bool = Field(default=True, description="no compilation: starts faster; set False on GPUs")

    nixl_threads: int = Field(default=0, ge=0, description="NIXL's worker threads; with its default of 4, pulls stall for up to 30 s")
    nixl_progress_delay_us: int = Field(default=100, ge=0, description="0 saves the last microseconds and burns a core for each engine")
    side_channel_host: str = Field(default="127.0.0.1", description="address that peers use for the handshake")
    side_channel_port: int = Field(default=0, ge=0, le=65535, description="0: any free port")
    require_routable_host: bool = Field(default=False, description="refuse a loopback or unset side channel host (several machines)")

    kv_lease_s: int = Field(default=30, ge=2, description="how long prefilled blocks wait for a peer unless extended")
    pull_timeout_s: float = Field(default=20.0, gt=0, description="how long a KV cache may take to be pulled")
    handshake_timeout_s: float = Field(default=10.0, gt=0, description="with a peer, for the first pull from it")
    call_timeout_s: float = Field(default=60.0, gt=0, description="administrative calls wait for the running step, but not longer")
    execute_model_timeout_s: int = Field(default=60, ge=1, description="a step that takes longer ends the engine")
    start_timeout_s: float = Field(default=900.0, gt=0, description="loading the model included")
    stop_timeout_s: float = Field(default=3.0, gt=0, description="after that the engine's processes are killed")

    lora_adapters: dict[str, str] = Field(default={}, description="adapters by name, and the folder of each")
    kv_events: bool = Field(default=True, description="tell routers what the prefix cache holds")
    environment_variables: dict[str, str] = Field(default={}, description="further variables for the engine's processes")
    engine_args: dict[str, JsonValue] = Field(default={}, description="any other option of vLLM's AsyncEngineArgs")

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Options that contradict each other are found here, before anything is loaded."""
        own = OWN_ARGUMENTS.intersection(self.engine_args)
        doubled = [name for name in self.engine_args if name in _arguments_from_fields(self)]
        if own or doubled:
            raise ValueError(f"engine_args may not set {', '.join(sorted([*own, *doubled]))}: Jetwake's own settings do")
        if self.require_routable_host and not is_routable(self.side_channel_host):
            raise ValueError(
                f"side_channel_host {self.side_channel_host!r} cannot be reached from other machines: give this host's address"
            )
        return self

    @property
    def name(self) -> str:
        return self.served_name or self.model


def is_routable(host: str) -> bool:
    """Whether peers on other machines may reach this address; a name counts as what it resolves to here."""
    if not host:
        return False
    try:
        address = ipaddress.ip_address(socket.gethostbyname(host))
    except (OSError, ValueError):
        return False
    return not (address.is_loopback or address.is_unspecified)


def reserved_side_channel(settings: VllmSettings) -> ReservedPort:
    """Free until the engine listens on it, a while from now. Raises SetupError when its host is no address of this machine."""
    host, port = settings.side_channel_host, settings.side_channel_port
    try:
        return ReservedPort(host, port)
    except OSError as error:
        raise SetupError(f"side_channel_host {host!r}, port {port}: {error.strerror or error}") from error


def environment(settings: VllmSettings, side_channel_port: int) -> dict[str, str]:
    """Variables that must be set before vLLM is imported, and when its processes are spawned."""
    variables = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": settings.side_channel_host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel_port),
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(settings.execute_model_timeout_s),
        "VLLM_NO_USAGE_STATS": "1",
        # vLLM sets this itself, but only if NIXL is not loaded yet, and our plugin loads it first.
        "UCX_RCACHE_MAX_UNRELEASED": "1024",
        "TOKENIZERS_PARALLELISM": "false",
        PROGRESS_DELAY_VARIABLE: str(settings.nixl_progress_delay_us),
        SPIN_VARIABLE: "" if settings.step_spin_s is None else str(settings.step_spin_s),
        OWNER_VARIABLE: str(os.getpid()),
    }
    if settings.device == "cpu":
        variables |= {
            "VLLM_CPU_KVCACHE_SPACE": str(settings.kv_cache_gib),
            "VLLM_CPU_OMP_THREADS_BIND": settings.omp_binding,
            "OMP_NUM_THREADS": str(settings.omp_threads),
            "OMP_WAIT_POLICY": settings.omp_wait_policy,
            "KMP_BLOCKTIME": "0" if settings.omp_wait_policy == "passive" else "200",
        }
        if settings.enforce_eager:
            # A few helpers (ranks of logprobs) would still be compiled at their first use, for seconds.
            variables["TORCHDYNAMO_DISABLE"] = "1"
    # A folder needs no hub: without this, every start asks the network about it.
    if os.path.isdir(settings.model):
        variables["HF_HUB_OFFLINE"] = "1"
    return variables | settings.environment_variables


def _arguments_from_fields(settings: VllmSettings) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "model": settings.model,
        "served_model_name": settings.name,
        "dtype": settings.dtype,
        "max_model_len": settings.max_model_len,
        "block_size": settings.block_size,
        "max_num_seqs": settings.max_num_seqs,
        "tensor_parallel_size": settings.tensor_parallel,
        "enforce_eager": settings.enforce_eager,
    }
    if settings.max_num_batched_tokens is not None:
        arguments["max_num_batched_tokens"] = settings.max_num_batched_tokens
    if settings.revision:
        arguments["revision"] = settings.revision
    if settings.lora_adapters:
        arguments["enable_lora"] = True
    return arguments


def engine_arguments(settings: VllmSettings, engine_id: str) -> dict[str, Any]:
    """Keyword arguments for AsyncEngineArgs, with plain mappings where vLLM wants a config object of its own."""
    transfer = {
        "kv_connector": CONNECTOR,
        "kv_role": "kv_both",
        "engine_id": engine_id,
        "kv_buffer_device": settings.kv_buffer_device or settings.device,
        # A failed pull must be told to us: recomputing in secret would hide the fault and take the decode engine's time.
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"num_threads": settings.nixl_threads, "kv_lease_duration": settings.kv_lease_s},
    }
    defaults: dict[str, Any] = {"enable_prefix_caching": True, "disable_hybrid_kv_cache_manager": True}
    arguments = defaults | settings.engine_args | _arguments_from_fields(settings)
    arguments |= {"kv_transfer_config": transfer, "worker_extension_cls": LEASE_KEEPER, "logits_processors": [FORCED_TOKENS]}
    if settings.kv_events:
        events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": events_endpoint(engine_id), "topic": "kv"}
        arguments["kv_events_config"] = events
    return arguments


def events_endpoint(engine_id: str) -> str:
    """A socket file of this engine alone. Short: the system allows about a hundred characters."""
    return f"ipc://{os.path.join(tempfile.gettempdir(), f'jw-kv-{engine_id[:18]}')}"


def unknown_arguments(given: dict[str, Any], known: frozenset[str]) -> None:
    """Raises SetupError naming each option that this vLLM does not have."""
    unknown = sorted(set(given) - known)
    if unknown:
        raise SetupError(f"this vLLM has no engine option {', '.join(unknown)}: check engine_args {json.dumps(unknown)}")
