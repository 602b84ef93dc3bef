"""Step times of a dense transformer on GPUs, from what the model computes and reads and what the GPU can do. Pure.

A step takes the longer of its arithmetic and its memory traffic, plus what is paid for each step. Arithmetic: two operations for
each parameter and token, and four for each attention head, head dimension and (query, key) pair. Traffic: all weights once, and the KV
cache of every sequence in the step. GPUs reach a part of their data sheet; the parts are the fields of `Efficiency`.
"""

from dataclasses import dataclass

from ..schemas.errors import SetupError
from .timing import Timing, attention_pairs

DTYPE_BYTES = {"bf16": 2, "fp8": 1}
ACTIVATION_BYTES = 2
"""Activations, and the results that tensor-parallel GPUs exchange, stay in 16 bits."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A dense decoder. `parameters` counts all; those of the token embedding are looked up and cost no arithmetic."""

    parameters: int
    layers: int
    hidden_size: int
    attention_heads: int
    kv_heads: int
    head_dim: int
    vocabulary_size: int

    @property
    def layer_parameters(self) -> int:
        """Of the layers alone: without token embedding and output head, of which an untied model has one each."""
        return self.parameters - 2 * self.head_parameters

    @property
    def head_parameters(self) -> int:
        return self.vocabulary_size * self.hidden_size

    def kv_bytes_per_token(self, kv_dtype: str) -> int:
        """Keys and values of all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * DTYPE_BYTES[kv_dtype]


@dataclass(frozen=True, slots=True)
class Gpu:
    """Data sheet figures of one GPU, without sparsity. `link_bytes_per_s`: to the other GPUs of its node, in one direction;
    `network_bytes_per_s`: of its part of the network between nodes, in one direction. `memory_bytes`: what a process can see of it.
    """

    memory_bytes: int
    memory_bytes_per_s: float
    bf16_flop_per_s: float
    fp8_flop_per_s: float
    link_bytes_per_s: float
    network_bytes_per_s: float

    def flop_per_s(self, dtype: str) -> float:
        return self.fp8_flop_per_s if dtype == "fp8" else self.bf16_flop_per_s


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Parts (0 to 1) of the data sheet that kernels reach, and what is paid for each step besides.

    `matmul`: large matrix products. `attention`: FlashAttention-3 in prefill; its paper (arXiv:2407.08608) measures up to 0.75 in the
    forward pass at head dimension 128, and less for the short or ragged sequences of a real batch. `memory`: streaming weights and KV
    cache. `link`: all-reduce between GPUs. `step_s`: scheduling, sampling and launching one step. `allreduce_s`: the latency of one.
    These are assumptions, not measurements: `jetwake profile` measures a system.
    """

    matmul: float = 0.65
    attention: float = 0.5
    memory: float = 0.8
    link: float = 0.7
    step_s: float = 0.001
    allreduce_s: float = 0.00001


@dataclass(frozen=True, slots=True)
class RooflineTiming(Timing):
    """One engine on `tensor_parallel` GPUs. Weights and their products in `dtype`; attention always in bf16."""

    model: ModelShape
    gpu: Gpu
    dtype: str = "bf16"
    kv_dtype: str = "bf16"
    tensor_parallel: int = 1
    efficiency: Efficiency = Efficiency()

    def __post_init__(self) -> None:
        """Raises SetupError."""
        for name in (self.dtype, self.kv_dtype):
            if name not in DTYPE_BYTES:
                raise SetupError(f"no dtype is called {name!r}; there are {', '.join(DTYPE_BYTES)}")
        if self.tensor_parallel < 1 or self.model.attention_heads % self.tensor_parallel:
            raise SetupError(f"tensor parallelism must divide the {self.model.attention_heads} heads; {self.tensor_parallel} does not")

    def prefill_s(self, new_tokens: int, context_tokens: int) -> float:
        return self._step_s(new_tokens, context_tokens, 0, 0.0)

    def decode_step_s(self, batch: int, used_fraction: float, context_tokens: float) -> float:
        return self._step_s(0, 0, batch, context_tokens)

    def mixed_step_s(self, new_tokens: int, prefix_tokens: int, batch: int, used_fraction: float, context_tokens: float) -> float:
        return self._step_s(new_tokens, prefix_tokens, batch, context_tokens)

    @property
    def weight_bytes(self) -> int:
        """Embedding and head stay in 16 bits, as in published fp8 models."""
        return self.model.layer_parameters * DTYPE_BYTES[self.dtype] + 2 * self.model.head_parameters * ACTIVATION_BYTES

    @property
    def kv_bytes_per_token(self) -> int:
        return self.model.kv_bytes_per_token(self.kv_dtype)

    def kv_capacity_tokens(self, memory_utilization: float = 0.9, reserved_bytes: float = 3e9) -> int:
        """What fits beside the weights, over all GPUs. `memory_utilization` is vLLM's `gpu_memory_utilization`; `reserved_bytes` of each GPU
        go to activations and CUDA graphs. Raises SetupError when nothing is left.
        """
        free_bytes = self.tensor_parallel * (self.gpu.memory_bytes * memory_utilization - reserved_bytes) - self.weight_bytes
        if free_bytes < self.kv_bytes_per_token:
            raise SetupError(
                f"the weights take {self.weight_bytes / 1e9:.0f} GB and leave no room for a KV cache: "
                f"use more than {self.tensor_parallel} GPU(s) for a worker, a smaller dtype or a larger GPU"
            )
        return int(free_bytes / self.kv_bytes_per_token)

    def _step_s(self, new_tokens: int, prefix_tokens: int, batch: int, context_tokens: float) -> float:
        tokens = new_tokens + batch
        if not tokens:
            return 0.0
        model, parts = self.model, self.efficiency
        pairs = attention_pairs(new_tokens, prefix_tokens) + context_tokens
        layers_flop = 2 * model.layer_parameters * tokens
        head_flop = 2 * model.head_parameters * (batch + (new_tokens > 0))
        attention_flop = 4 * model.layers * model.attention_heads * model.head_dim * pairs
        matmul_s = layers_flop / self.gpu.flop_per_s(self.dtype) + head_flop / self.gpu.bf16_flop_per_s
        compute_s = matmul_s / parts.matmul + attention_flop / self.gpu.bf16_flop_per_s / parts.attention
        read_bytes = self.weight_bytes - model.head_parameters * ACTIVATION_BYTES  # of the embedding, a few rows
        read_bytes += self.kv_bytes_per_token * (prefix_tokens + new_tokens + context_tokens)
        memory_s = read_bytes / self.gpu.memory_bytes_per_s / parts.memory
        return max(compute_s, memory_s) / self.tensor_parallel + self._exchange_s(tokens) + parts.step_s

    def _exchange_s(self, tokens: int) -> float:
        """Two all-reduces in each layer; in a ring each GPU sends all but one part of the data twice."""
        if self.tensor_parallel == 1:
            return 0.0
        sent_bytes = 2 * (1 - 1 / self.tensor_parallel) * tokens * self.model.hidden_size * ACTIVATION_BYTES
        one_s = self.efficiency.allreduce_s + sent_bytes / self.gpu.link_bytes_per_s / self.efficiency.link
        return 2 * self.model.layers * one_s
