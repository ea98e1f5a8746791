"""Time of a mixture's routed experts in a step.

    experts = layers * (latency + |T * weights of one / (bandwidth * share), 2 * params of one * R / (FLOP/s * share)|
                        + (rows and tokens moved) / bandwidth + exchange)
    T       = experts that N tokens touch on one GPU: E / g * (1 - (1 - k / E)^(skew * N))
    R       = N * k / g * imbalance(g) + T * tile: rows that the fullest group computes, whole tiles

for N tokens, E experts, k of them per token, g groups of GPUs with experts of their own, each expert sliced among the
GPUs of a group. `skew` below 1 says that some experts are asked for more often, so that fewer are touched; `imbalance`
that the fullest group has g^x times the mean. Both are fitted to a table whose tokens follow a power law of exponent
1.01 (`constants.Kernels`).
"""

from __future__ import annotations

from math import exp, log, sqrt

from expediter.perfmodel.constants import Engine, ExpertKernels
from expediter.perfmodel.dimensions import DTYPE_BYTES, Experts, ModelShape
from expediter.perfmodel.hardware import Gpu
from expediter.perfmodel.parallelism import Parallelism


def smooth_max(a: float, b: float) -> float:
    """Return (a^4 + b^4)^(1/4), a maximum without its sharp knee."""
    a *= a
    b *= b
    return sqrt(sqrt(a * a + b * b))


class ExpertTime:
    """Time of all routed experts of a model on the fullest GPU; formula: see the module."""

    def __init__(self, shape: ModelShape, experts: Experts, gpu: Gpu, parallelism: Parallelism, engine: Engine) -> None:
        kernels, dtype = gpu.kernels, shape.expert_dtype
        of_dtype, flops = _kernels_of(gpu, dtype)
        groups = parallelism.expert
        sliced = parallelism.num_gpus_per_stage // groups  # GPUs that share each expert
        layers = experts.num_layers * parallelism.layers_factor(shape)
        params = shape.num_params_per_expert / sliced
        self._num_local = experts.num_experts / groups
        miss = 1 - experts.top_k / experts.num_experts
        # Where every token asks for all experts, all are touched.
        self._log_miss = kernels.expert_skew * log(miss) if miss else -1e9
        self._rows_per_token = experts.top_k / groups * groups**kernels.expert_imbalance
        self._tile = of_dtype.tile_tokens
        self._latency_s = layers * (of_dtype.latency_s + (of_dtype.group_latency_s if groups > 1 else 0.0))
        self._expert_s = (
            layers
            * params
            * DTYPE_BYTES[dtype]
            * engine.memory_factor
            / (gpu.memory_bandwidth * of_dtype.bandwidth_share)
        )
        self._row_s = layers * 2 * params * engine.compute_factor / (flops * of_dtype.flops_share)
        # A row is written for its expert and read, and so is its result; before and after, every token is.
        moved = 4 * of_dtype.row_factor * experts.top_k / groups + 2 * of_dtype.token_factor
        self._token_s = layers * moved * shape.hidden_size * shape.bytes_per_value / gpu.memory_bandwidth
        if parallelism.num_groups > 1:
            self._add_exchange(shape, experts, gpu, parallelism, layers)

    def _add_exchange(
        self, shape: ModelShape, experts: Experts, gpu: Gpu, parallelism: Parallelism, layers: float
    ) -> None:
        """Add two all-to-alls per layer: tokens go to the GPUs of their experts, results come back.

        Without groups whose attention has sequences of their own there is none: every GPU has all tokens.
        """
        num_gpus = parallelism.num_gpus_per_stage
        kernels = gpu.kernels
        message = shape.hidden_size * shape.bytes_per_value / num_gpus  # of a token, on the GPU that it comes from
        copies = min(experts.top_k, num_gpus) * (num_gpus - 1) / num_gpus
        seconds = message * copies / (gpu.link_bandwidth * kernels.all_to_all_share)
        latency_s = kernels.all_to_all_latency_s
        num_nodes = -(-num_gpus // gpu.max_tensor_parallel)
        if num_nodes > 1:
            between = message * copies * (num_nodes - 1) / num_nodes
            seconds = max(seconds, between / gpu.network_bandwidth)
            latency_s += gpu.network_latency_s
        self._latency_s += 2 * layers * latency_s
        self._token_s += 2 * layers * seconds

    def time_s(self, num_tokens: float) -> float:
        """Return seconds per step that computes so many tokens, over all groups together."""
        touched = self._num_local * (1.0 - exp(self._log_miss * num_tokens))
        rows = self._rows_per_token * num_tokens + touched * self._tile
        return self._latency_s + smooth_max(self._expert_s * touched, self._row_s * rows) + self._token_s * num_tokens


def _kernels_of(gpu: Gpu, dtype: str) -> tuple[ExpertKernels, float]:
    """Return the kernels and the peak FLOP/s of experts of a type; types that the GPU lacks compute in bfloat16."""
    known = gpu.kernels.experts
    if dtype == "fp4":
        return (known.fp8, gpu.fp4_flops) if gpu.fp4_flops else (known.fp4, gpu.flops)
    if dtype == "fp8" and gpu.fp8_flops:
        return known.fp8, gpu.fp8_flops
    return known.bf16, gpu.flops
