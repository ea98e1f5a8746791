"""Analytic step time of a dense model on tensor-parallel GPUs.

    T = overhead                                              what the host does between steps
      + layers * kernels * kernel_latency                     floor of the small kernels
      + hypot(weight read, matrix products)                   roofline of the linear layers, smooth at its knee
      + prefill attention + KV read                           compute-bound chunks, memory-bound decodes
      + 2 * layers * all-reduce                               tensor parallelism

with, for n GPUs, N tokens and S sequences in the step (`StepFeatures`):

    weight read       = layer and head weights / n / (bandwidth * weight_read_efficiency)
    matrix products   = 2 * (layer params * N + head params * S) / n / (FLOP/s * gemm_efficiency)
    prefill attention = 4 * layers * heads * head_dim * sum chunk * (prefix + chunk / 2) / n
                        / (FLOP/s * prefill_attention_efficiency)
    KV read           = decode context tokens * KV bytes per token and GPU / (bandwidth * kv_read_efficiency)
    all-reduce        = latency + 2 * (n - 1) / n * N * hidden * bytes / (link * link_efficiency), 0 for one GPU

The terms follow the usual roofline account of a decoder (T = c0 + max(c_w, c1 * N) + c2 * context + c3 * attention). A
sharp maximum is too low around the knee, where measured kernels reach neither limit; the root of the sum of squares is
equal to it far from the knee and closer to the measured tables at it.

Sources of the constants: `hardware`. The ring all-reduce moves 2 * (n - 1) / n of the data over each link. `kernels` is
the count of launches in a layer of a current engine (two norms, four matrix products, rotation, KV write, attention,
activation). `overhead` is an assumption, of the size that engines with CUDA graphs report for scheduling, sampling and
the copy of tokens.

How far off it is (median of |predicted / measured - 1|; the tests hold it to these):

- Time per output token of whole engines under load on H100 (AIConfigurator's published measurements without a stated
  quantization): 12 % for Llama-3.1-8B on TensorRT-LLM (177 configurations), 11 % for Qwen3-32B on vLLM (90).
- Llama-2-70B on 4 and 8 A100 or H100 (SplitwiseSim's published runs): prefill 31-53 %, decode 31-61 %, all too low.
  That software had no CUDA graphs: its decodes take as long on 8 GPUs as on 4. With an overhead of 25 ms for it
  prefill is off by 9-21 %, decode by 9-43 %.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from expediter.core.errors import ConfigurationError
from expediter.core.plan import StepFeatures
from expediter.perfmodel.hardware import Gpu
from expediter.perfmodel.shapes import ModelShape

_KERNELS_PER_LAYER: Final = 10
_STEP_OVERHEAD_S: Final = 0.002


class RooflineModel:
    """`StepTimeModel` from a model's shape and a GPU's constants; the formula is in the module's docstring.

    Args:
        tensor_parallel: GPUs that share the model, inside one node.
        overhead_s: fixed cost of a step on the host.
    Raises:
        ConfigurationError: the model cannot be split so, or a node has fewer GPUs.
    """

    def __init__(
        self, shape: ModelShape, gpu: Gpu, tensor_parallel: int = 1, *, overhead_s: float = _STEP_OVERHEAD_S
    ) -> None:
        shape.check_tensor_parallel(tensor_parallel)
        if tensor_parallel > gpu.max_tensor_parallel:
            raise ConfigurationError(
                f"{tensor_parallel} GPUs per replica exceed the {gpu.max_tensor_parallel} of one {gpu.name} node"
            )
        n = tensor_parallel
        flops = gpu.flops * gpu.gemm_efficiency * n
        read_params = shape.num_layer_params + shape.num_head_params
        self._fixed_s = overhead_s + shape.num_layers * _KERNELS_PER_LAYER * gpu.kernel_latency_s
        self._weights_s = read_params * shape.bytes_per_value / n / (gpu.memory_bandwidth * gpu.weight_read_efficiency)
        self._per_token_s = 2 * shape.num_layer_params / flops
        self._per_seq_s = 2 * shape.num_head_params / flops
        self._per_attention_s = (
            4 * shape.num_layers * shape.num_heads * shape.head_dim / (gpu.flops * gpu.prefill_attention_efficiency * n)
        )
        self._per_context_token_s = shape.kv_bytes_per_token_on_gpu(n) / (gpu.memory_bandwidth * gpu.kv_read_efficiency)
        self._all_reduce_fixed_s = 0.0
        self._all_reduce_per_token_s = 0.0
        if n > 1:
            token_bytes = shape.hidden_size * shape.bytes_per_value
            per_token_s = 2 * (n - 1) / n * token_bytes / (gpu.link_bandwidth * gpu.link_efficiency)
            self._all_reduce_fixed_s = 2 * shape.num_layers * gpu.all_reduce_latency_s
            self._all_reduce_per_token_s = 2 * shape.num_layers * per_token_s

    def step_time_s(self, features: StepFeatures) -> float:
        """Return the duration of one step in seconds."""
        return self._without_context_s(features) + self._per_context_token_s * features.decode_context_tokens

    def decode_run_s(self, features: StepFeatures, num_steps: int) -> npt.NDArray[np.float64]:
        """Return the durations of `num_steps` successive decode steps, float64, shape [num_steps]; see the port."""
        grown = np.arange(num_steps, dtype=np.float64)
        # Token counts are integers far below 2**53, hence exact; the sum and the product below are then the same two
        # roundings as in step_time_s.
        grown *= features.num_decodes
        grown += features.decode_context_tokens
        grown *= self._per_context_token_s
        grown += self._without_context_s(features)
        return grown

    def _without_context_s(self, features: StepFeatures) -> float:
        num_tokens = features.num_tokens
        products_s = self._per_token_s * num_tokens + self._per_seq_s * features.num_seqs
        return (
            self._fixed_s
            + math.hypot(self._weights_s, products_s)
            + self._per_attention_s * features.prefill_attention
            + (self._all_reduce_fixed_s + self._all_reduce_per_token_s * num_tokens)
        )


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
