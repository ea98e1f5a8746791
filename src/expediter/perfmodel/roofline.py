"""Analytic step time of a dense model on tensor-parallel GPUs, kernel by kernel.

    T = host + |launch, GPU|                                |a, b| = (a^4 + b^4)^(1/4), a max without its sharp knee
    GPU = layers * (4 products, attention, small kernels, 2 all-reduces) + output head
    product           = latency + |weights / (bandwidth * share), 2 * params * N / (FLOP/s * share)|
    prefill attention = latency + 4 * heads * head_dim * (sum chunk * (prefix + chunk / 2) + N * tile / 2)
                        / (FLOP/s * share)
    decode attention  = latency + decode context tokens * KV bytes per token and layer / (bandwidth * share)
    small kernel      = latency + bytes in and out / bandwidth
    all-reduce        = latency + 2 * (n - 1) / n * N * hidden * bytes / (link * share), 0 for one GPU

for N tokens on n GPUs (`StepFeatures`), everything divided among the GPUs where they share it. The kernels' shares and
latencies belong to the GPU's generation (`constants.Kernels`), the host's times and four factors to the engine
(`constants.Engine`). At a knee a sharp maximum is too low and the root of squares too high; the fourth power is closest
to the measured products. It costs two square roots, which round the same way one by one and in arrays.

docs/perfmodel.md holds the sources of every constant and how far off the model is.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from expediter.core.errors import ConfigurationError
from expediter.core.plan import StepFeatures
from expediter.perfmodel.constants import Engine, engine_named
from expediter.perfmodel.hardware import Gpu
from expediter.perfmodel.shapes import ModelShape

_PRODUCTS: Final = 4  # query-key-value, attention output, gate and up, down
_SMALL_KERNELS: Final = 5  # two norms with the residual, rotation, KV write, activation
DEFAULT_ENGINE: Final = "vllm"


class RooflineModel:
    """`StepTimeModel` from a model's shape, a GPU's constants and an engine's overhead; formula: see the module.

    Args:
        tensor_parallel: GPUs that share the model, inside one node.
        engine: what the software adds to its kernels; vLLM's if there is none.
    Raises:
        ConfigurationError: the model cannot be split so, or a node has fewer GPUs.
    """

    def __init__(self, shape: ModelShape, gpu: Gpu, tensor_parallel: int = 1, *, engine: Engine | None = None) -> None:
        shape.check_tensor_parallel(tensor_parallel)
        if tensor_parallel > gpu.max_tensor_parallel:
            raise ConfigurationError(
                f"{tensor_parallel} GPUs per replica exceed the {gpu.max_tensor_parallel} of one {gpu.name} node"
            )
        if shape.fp8_weights and not gpu.fp8_flops:
            raise ConfigurationError(f"{gpu.name} does not compute in fp8, which {shape.name} asks for")
        engine = engine_named(DEFAULT_ENGINE) if engine is None else engine
        n, layers, kernels = tensor_parallel, shape.num_layers, gpu.kernels
        weight_bandwidth = gpu.memory_bandwidth * kernels.gemm_bandwidth_share * n / engine.memory_factor
        flops = gpu.flops * kernels.gemm_flops_share * n / engine.compute_factor
        layer_flops, layer_bandwidth, latency_s = flops, weight_bandwidth, kernels.gemm_latency_s
        if shape.fp8_weights:
            layer_flops = gpu.fp8_flops * kernels.fp8_gemm_flops_share * n / engine.compute_factor
            layer_bandwidth = gpu.memory_bandwidth * kernels.fp8_gemm_bandwidth_share * n / engine.memory_factor
            latency_s = kernels.fp8_gemm_latency_s
        attention_flops = gpu.flops * kernels.prefill_attention_share * n / engine.compute_factor
        self._host_s, self._host_prefill_s, self._host_seq_s = engine.step_s, engine.prefill_step_s, engine.seq_s
        self._decode_launch_s, self._prefill_launch_s = engine.decode_launch_s, engine.prefill_launch_s
        self._fixed_s = layers * _PRODUCTS * latency_s + kernels.gemm_latency_s
        self._fixed_s += layers * _SMALL_KERNELS * kernels.small_kernel_s
        self._fixed_prefill_s = layers * kernels.prefill_attention_latency_s
        self._fixed_decode_s = layers * kernels.decode_attention_latency_s
        self._layer_weights_s = shape.layer_weight_bytes / layer_bandwidth
        self._head_weights_s = shape.num_head_params * shape.bytes_per_value / weight_bandwidth
        self._layer_token_s = 2 * shape.num_layer_params / layer_flops
        self._head_seq_s = 2 * shape.num_head_params / flops
        self._attention_s = 4 * layers * shape.num_heads * shape.head_dim / attention_flops
        self._prefill_token_s = self._attention_s * kernels.prefill_attention_tile / 2
        self._context_token_s = (
            shape.kv_bytes_per_token_on_gpu(n)
            * engine.memory_factor
            / (gpu.memory_bandwidth * kernels.kv_bandwidth_share)
        )
        self._token_s = layers * _small_kernel_bytes(shape, n) / gpu.memory_bandwidth
        self._bulk_tokens, self._bulk_token_s = 1 << 62, 0.0
        if n > 1:
            message_s = shape.hidden_size * shape.bytes_per_value / gpu.link_bandwidth
            self._fixed_s += 2 * layers * gpu.all_reduce_latency_s
            self._token_s += 2 * layers * message_s * 2 * (n - 1) / n / kernels.link_share * engine.all_reduce_factor
            self._bulk_tokens = -(-engine.bulk_bytes // (shape.hidden_size * shape.bytes_per_value))
            self._bulk_token_s = 2 * layers * message_s * n * engine.bulk_all_reduce_factor

    def step_time_s(self, features: StepFeatures) -> float:
        """Return the duration of one step in seconds."""
        host_s, launch_s, gpu_s = self._without_context_s(features)
        gpu_s += self._context_token_s * features.decode_context_tokens
        return host_s + (_smooth_max(launch_s, gpu_s) if launch_s else gpu_s)

    def decode_run_s(self, features: StepFeatures, num_steps: int) -> npt.NDArray[np.float64]:
        """Return the durations of `num_steps` successive decode steps, float64, shape [num_steps]; see the port."""
        host_s, launch_s, gpu_s = self._without_context_s(features)
        grown = np.arange(num_steps, dtype=np.float64)
        # Token counts are integers far below 2**53, hence exact; what follows are then the same roundings, in the same
        # order, as in step_time_s.
        grown *= features.num_decodes
        grown += features.decode_context_tokens
        grown *= self._context_token_s
        grown += gpu_s
        if launch_s:
            squared = launch_s * launch_s
            grown *= grown
            grown *= grown
            grown += squared * squared
            np.sqrt(grown, out=grown)
            np.sqrt(grown, out=grown)
        grown += host_s
        return grown

    def _without_context_s(self, features: StepFeatures) -> tuple[float, float, float]:
        """Return the host's serial time, its launch time, and the GPU's time without reading decode context."""
        num_tokens, num_seqs, num_decodes = features.num_tokens, features.num_seqs, features.num_decodes
        host_s, launch_s = self._host_s + self._host_seq_s * num_seqs, self._decode_launch_s
        gpu_s = (
            self._fixed_s
            + _smooth_max(self._layer_weights_s, self._layer_token_s * num_tokens)
            + _smooth_max(self._head_weights_s, self._head_seq_s * num_seqs)
            + self._token_s * num_tokens
        )
        if num_decodes:
            gpu_s += self._fixed_decode_s
        if num_tokens > num_decodes:
            host_s, launch_s = host_s + self._host_prefill_s, self._prefill_launch_s
            gpu_s += (
                self._fixed_prefill_s
                + self._attention_s * features.prefill_attention
                + self._prefill_token_s * (num_tokens - num_decodes)
            )
        if num_tokens >= self._bulk_tokens:
            gpu_s += self._bulk_token_s * num_tokens
        return host_s, launch_s, gpu_s


def _smooth_max(a: float, b: float) -> float:
    """Return (a^4 + b^4)^(1/4) by the operations, in the order, that `decode_run_s` applies to arrays."""
    a *= a
    b *= b
    return sqrt(sqrt(a * a + b * b))


def _small_kernel_bytes(shape: ModelShape, n: int) -> float:
    """Return what the small kernels of a layer move per token on each of n GPUs.

    Norms read and write the residual and their result (8 widths in all), rotation and KV write go over query, key and
    value twice, the activation reads what one or two products wrote and writes one.
    """
    query_key_value = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim / n
    activation = (3 if shape.gated else 2) * shape.intermediate_size / n
    return shape.bytes_per_value * (8 * shape.hidden_size + 2 * query_key_value + activation)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCapacity:
    """How much KV a replica holds.

    Attributes:
        num_blocks: blocks of `block_size` tokens.
        kv_bytes: what they take on each GPU.
    """

    num_blocks: int
    kv_bytes: int


def kv_capacity(
    shape: ModelShape, gpu: Gpu, tensor_parallel: int, block_size: int, *, memory_utilization: float = 0.9
) -> KVCapacity:
    """Return how many blocks fit beside the weights: memory * utilization - weights / n - reserved.

    Args:
        memory_utilization: share of a GPU's memory that the engine may use (vLLM's gpu_memory_utilization).
    Raises:
        ConfigurationError: the weights leave no room for one block; the message says how many GPUs it would take.
    """
    shape.check_tensor_parallel(tensor_parallel)
    blocks = _blocks_beside_weights(shape, gpu, tensor_parallel, block_size, memory_utilization)
    if blocks < 1:
        fitting = [
            n
            for n in (2, 4, 8, 16, 32, 64)
            if n > tensor_parallel
            and shape.divides_among(n)
            and _blocks_beside_weights(shape, gpu, n, block_size, memory_utilization) > 0
        ]
        hint = f"; it takes at least {fitting[0]}" if fitting else ""
        raise ConfigurationError(
            f"{shape.name} ({shape.weight_bytes / 1e9:.1f} GB of weights) does not fit {tensor_parallel} x {gpu.name} "
            f"({gpu.memory_bytes / 1e9:.1f} GB each, {memory_utilization:.0%} usable){hint}"
        )
    return KVCapacity(
        num_blocks=blocks, kv_bytes=blocks * block_size * shape.kv_bytes_per_token_on_gpu(tensor_parallel)
    )


class HostTierSize(NamedTuple):
    """Blocks in host memory, and the time to move one there or back; every GPU moves its share over its own link."""

    num_blocks: int
    block_swap_s: float


def host_tier_size(
    shape: ModelShape, gpu: Gpu, tensor_parallel: int, block_size: int, swap_space_bytes: int
) -> HostTierSize:
    """Return how many blocks fit the host memory of a replica, and how fast they move.

    Args:
        swap_space_bytes: host memory per GPU (vLLM's swap_space).
    """
    block_bytes = block_size * shape.kv_bytes_per_token_on_gpu(tensor_parallel)
    return HostTierSize(swap_space_bytes // block_bytes, block_bytes / (gpu.host_bandwidth * gpu.host_efficiency))


def _blocks_beside_weights(
    shape: ModelShape, gpu: Gpu, tensor_parallel: int, block_size: int, memory_utilization: float
) -> int:
    weights = -(-shape.weight_bytes // tensor_parallel)
    room = int(gpu.memory_bytes * memory_utilization) - weights - gpu.reserved_bytes
    return room // (shape.kv_bytes_per_token_on_gpu(tensor_parallel) * block_size)
