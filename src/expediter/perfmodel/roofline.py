"""Analytic step time of a decoder on the GPUs of a replica, kernel by kernel.

    T = host + |launch, GPU|_3                   |a, b| = (a^4 + b^4)^(1/4), |a, b|_3 = (a^3 + b^3)^(1/3)
    GPU = layers * (products, attention, small kernels, experts, 2 all-reduces) + output head + sends between stages
    products          = latency each + |weights / (bandwidth * share), 2 * params * N / (FLOP/s * share)|
    prefill attention = latency + 4 * heads * head_dim * (sum chunk * (prefix + chunk / 2) + N * tile / 2)
                        / (FLOP/s * share)
    decode attention  = latency + decode context tokens * KV bytes per token and layer / (bandwidth * share)
    small kernel      = latency + bytes in and out / bandwidth
    experts           = latency + |touched experts' weights / (bandwidth * share), 2 * params * rows / (FLOP/s * share)|
                        + moving tokens to experts and back                             (`expert_time`)
    all-reduce        = latency + 2 * (n - 1) / n * N * hidden * bytes / (link * share), 0 for one GPU

for N tokens on n GPUs (`StepFeatures`), everything divided among the GPUs where they share it. The kernels' shares and
latencies belong to the GPU's generation (`constants.Kernels`), the host's times and four factors to the engine
(`constants.Engine`). At a knee a sharp maximum is too low and the root of squares too high; the fourth power is closest
to the measured products. It costs two square roots. Launches hide
less well behind a GPU that waits for other GPUs at every all-reduce: their knee is softer.

**Windows.** A windowed layer reads min(context, window) per sequence; of a step only sums are known, so every sequence
counts as one of the mean length.

**Pipeline stages.** A step of the scheduler is a round: its batch is cut into m = min(stages, sequences) equal
microbatches that follow each other through the stages, and the next round follows without draining the pipeline, as
in engines that keep one batch per stage in flight. It takes as long as a microbatch takes through all stages, sends
included; the share of (stages - m) / stages idles. A pipeline that fills and drains around M microbatches idles
(stages - 1) / (M + stages - 1), which is the same for a lone one and vanishes over a busy period.

docs/perfmodel.md holds the sources of every constant and how far off the model is.
"""

from __future__ import annotations

from math import sqrt
from typing import Final

import numpy as np
import numpy.typing as npt

from expediter.core.plan import StepFeatures
from expediter.perfmodel.constants import Engine, Kernels, engine_named
from expediter.perfmodel.dimensions import DTYPE_BYTES, ModelShape
from expediter.perfmodel.expert_time import ExpertTime, smooth_max
from expediter.perfmodel.hardware import Gpu
from expediter.perfmodel.parallelism import Parallelism

_SMALL_KERNELS: Final = 5  # two norms with the residual, rotation, KV write, activation
_LATENT_NORMS: Final = 2  # of the compressed query and of the latent vector
_FITTED_HEAD: Final = 128
_HEAD_EXPONENT: Final = 0.3
"""Prefill attention on H100 reaches 0.53, 0.67, 0.76, 0.79 of the peak with heads of 64, 128, 192, 256 elements."""
_CONVERSIONS: Final = 2  # to fp8: the outputs of attention and activation; norms write fp8 themselves
DEFAULT_ENGINE: Final = "vllm"


class RooflineModel:
    """`StepTimeModel` from a model's shape, a GPU's constants and an engine's overhead; formula: see the module.

    Args:
        tensor_parallel: GPUs that share every layer, inside one node.
        pipeline_parallel: stages that share the layers.
        expert_parallel: groups that share the experts (`parallelism.Parallelism`).
        engine: what the software adds to its kernels; vLLM's if there is none.
    Raises:
        ConfigurationError: the model cannot be split so, or a node has fewer GPUs.
    """

    def __init__(
        self,
        shape: ModelShape,
        gpu: Gpu,
        tensor_parallel: int = 1,
        pipeline_parallel: int = 1,
        expert_parallel: int = 1,
        *,
        engine: Engine | None = None,
    ) -> None:
        parallelism = Parallelism(tensor=tensor_parallel, pipeline=pipeline_parallel, expert=expert_parallel)
        parallelism.check(shape, gpu)
        engine = engine_named(DEFAULT_ENGINE) if engine is None else engine
        self._host_s = engine.step_s + engine.worker_s * tensor_parallel
        self._host_prefill_s, self._seq_s = engine.prefill_step_s, engine.seq_s
        self._decode_launch_s, self._prefill_launch_s = engine.decode_launch_s, engine.prefill_launch_s
        self._num_stages, self._num_groups = parallelism.pipeline, parallelism.num_groups
        self._is_split = self._num_stages * self._num_groups > 1
        # The slowest stage sets the pace: where layers do not divide, all stages count as the fullest.
        layers = shape.num_layers * parallelism.layers_factor(shape)
        self._set_products(shape, gpu, parallelism, engine)
        self._set_attention(shape, gpu, tensor_parallel, engine, layers)
        self._token_s += layers * _small_kernel_bytes(shape, tensor_parallel) / gpu.memory_bandwidth
        self._bulk_tokens, self._bulk_token_s = 1 << 62, 0.0
        if tensor_parallel > 1:
            self._add_all_reduces(shape, gpu, parallelism, engine, layers)
        self._add_sends(shape, gpu, parallelism)
        self._experts = None
        if shape.experts is not None:
            self._experts = ExpertTime(shape, shape.experts, gpu, parallelism, engine)

    def _set_products(self, shape: ModelShape, gpu: Gpu, parallelism: Parallelism, engine: Engine) -> None:
        n, kernels, factor = parallelism.tensor, gpu.kernels, parallelism.layers_factor(shape)
        bandwidth = gpu.memory_bandwidth * kernels.gemm_bandwidth_share * n / engine.memory_factor
        flops = gpu.flops * kernels.gemm_flops_share * n / engine.compute_factor
        layer_flops, layer_bandwidth, latency_s = flops, bandwidth, kernels.gemm_latency_s
        self._token_s, small_kernels = 0.0, _SMALL_KERNELS + (0 if shape.latent is None else _LATENT_NORMS)
        peak = {"fp8": gpu.fp8_flops, "fp4": gpu.fp4_flops}.get(shape.weight_dtype, 0.0)
        if peak and kernels.fp8_gemm_flops_share:
            # Elsewhere such weights are only kept so, and are multiplied in bfloat16.
            layer_flops = peak * kernels.fp8_gemm_flops_share * n / engine.compute_factor
            layer_bandwidth = gpu.memory_bandwidth * kernels.fp8_gemm_bandwidth_share * n / engine.memory_factor
            latency_s = kernels.fp8_gemm_latency_s
            converted = factor * _converted_width(shape, n)
            self._token_s = converted * (1 + shape.bytes_per_value) / gpu.memory_bandwidth
            small_kernels += _CONVERSIONS
        self._fixed_s = factor * _num_products(shape) * latency_s + kernels.gemm_latency_s
        self._fixed_s += factor * shape.num_layers * small_kernels * kernels.small_kernel_s
        self._layer_weights_4 = (factor * shape.dense_weight_bytes / layer_bandwidth) ** 4
        self._head_weights_4 = (shape.num_head_params * shape.bytes_per_value / bandwidth) ** 4
        self._layer_token_s = factor * 2 * shape.num_dense_params / layer_flops
        self._head_seq_s = 2 * shape.num_head_params / flops

    def _set_attention(self, shape: ModelShape, gpu: Gpu, n: int, engine: Engine, layers: float) -> None:
        kernels = gpu.kernels
        widths, latent = 2 * shape.head_dim, shape.latent
        head_dim = shape.head_dim if latent is None else latent.nope_head_dim + latent.rope_head_dim
        share = kernels.prefill_attention_share * (head_dim / _FITTED_HEAD) ** _HEAD_EXPONENT
        flops = gpu.flops * share * n / engine.compute_factor
        if latent is not None:
            widths = latent.nope_head_dim + latent.rope_head_dim + latent.value_head_dim
        self._fixed_prefill_s = layers * kernels.prefill_attention_latency_s
        self._fixed_decode_s = layers * kernels.decode_attention_latency_s
        self._tile = kernels.prefill_attention_tile / 2
        pair_s = 2 * layers * shape.num_heads * widths / flops
        token_s = (
            layers
            * shape.kv_bytes_per_token_on_gpu(n)
            / shape.num_layers
            * engine.memory_factor
            / (gpu.memory_bandwidth * _kv_share(kernels, shape.kv_dtype))
        )
        if latent is not None:
            # Every head of this GPU multiplies with the latent vector as it is read.
            token_s = smooth_max(token_s, 2 * layers * shape.num_heads * (latent.kv_width + latent.kv_rank) / flops)
        windowed = shape.num_windowed_layers / shape.num_layers
        self._window = shape.window_tokens if windowed else 0
        self._attention_s, self._windowed_attention_s = pair_s * (1 - windowed), pair_s * windowed
        self._context_token_s, self._windowed_token_s = token_s * (1 - windowed), token_s * windowed
        self._prefill_token_s = pair_s * self._tile

    def _add_all_reduces(
        self, shape: ModelShape, gpu: Gpu, parallelism: Parallelism, engine: Engine, layers: float
    ) -> None:
        """Add two all-reduces per layer, one where the experts' results travel otherwise (`ExpertTime`)."""
        n = parallelism.tensor
        reduces = 2 * layers
        if parallelism.num_groups > 1 and shape.experts is not None:
            reduces -= shape.experts.num_layers * parallelism.layers_factor(shape)
        message_bytes = shape.hidden_size * shape.bytes_per_value
        message_s = message_bytes / gpu.link_bandwidth
        self._fixed_s += reduces * gpu.all_reduce_latency_s
        if shape.norms_across_heads:
            # Their messages are a number per token: nothing but latency, and a kernel before it.
            self._fixed_s += 2 * layers * (gpu.all_reduce_latency_s + gpu.kernels.small_kernel_s)
        self._token_s += reduces * message_s * 2 * (n - 1) / n / gpu.kernels.link_share * engine.all_reduce_factor
        self._bulk_tokens = int(-(-engine.bulk_bytes // message_bytes))
        self._bulk_token_s = reduces * message_bytes / gpu.host_bandwidth * (1 - 2 / n) * engine.bulk_all_reduce_factor

    def _add_sends(self, shape: ModelShape, gpu: Gpu, parallelism: Parallelism) -> None:
        """Add the sends between stages: every GPU sends a token's activations, over the network between nodes."""
        sends = parallelism.pipeline - 1
        if sends == 0:
            return
        bandwidth = gpu.link_bandwidth * gpu.kernels.link_share
        if parallelism.num_gpus > gpu.max_tensor_parallel:
            bandwidth = min(bandwidth, gpu.network_bandwidth)
        self._fixed_s += sends * gpu.network_latency_s
        self._token_s += sends * shape.hidden_size * shape.bytes_per_value / bandwidth

    def step_time_s(self, features: StepFeatures) -> float:
        """Return the duration of one step in seconds."""
        host_s, launch_s, gpu_s, pieces = self._without_context_s(features)
        context: float = features.decode_context_tokens
        if pieces != 1:
            context /= pieces
        gpu_s += self._context_token_s * context
        if self._window:
            gpu_s += self._windowed_token_s * min(context, self._window * features.num_decodes / pieces)
        if launch_s:
            # NumPy's root here too: the C library's may round otherwise than NumPy's on arrays.
            gpu_s = float(np.cbrt(launch_s * launch_s * launch_s + gpu_s * gpu_s * gpu_s))
        return host_s + gpu_s

    def decode_run_s(self, features: StepFeatures, num_steps: int) -> npt.NDArray[np.float64]:
        """Return the durations of `num_steps` successive decode steps, float64, shape [num_steps]; see the port."""
        host_s, launch_s, gpu_s, pieces = self._without_context_s(features)
        grown = np.arange(num_steps, dtype=np.float64)
        # Token counts are integers far below 2**53, hence exact; what follows are then the same roundings, in the same
        # order, as in step_time_s.
        grown *= features.num_decodes
        grown += features.decode_context_tokens
        if pieces != 1:
            grown /= pieces
        windowed = None
        if self._window:
            windowed = np.minimum(grown, self._window * features.num_decodes / pieces)
            windowed *= self._windowed_token_s
        grown *= self._context_token_s
        grown += gpu_s
        if windowed is not None:
            grown += windowed
        if launch_s:
            cubed = grown * grown
            cubed *= grown
            cubed += launch_s * launch_s * launch_s
            np.cbrt(cubed, out=grown)
        grown += host_s
        return grown

    def _without_context_s(self, features: StepFeatures) -> tuple[float, float, float, int]:
        """Return the host's serial time, its launch time, the GPU's time without reading decode context, the pieces.

        Pieces are the equal parts that the batch is cut into, of which every GPU computes one at a time.
        """
        num_tokens: float
        num_seqs: float
        num_decodes: float
        expert_tokens: float
        num_tokens, num_seqs, num_decodes, _, attention = features
        expert_tokens, pieces = num_tokens, 1
        if self._is_split:
            microbatches = max(1, min(self._num_stages, features.num_seqs))
            pieces = microbatches * max(1, min(self._num_groups, features.num_seqs // microbatches))
            expert_tokens = num_tokens / microbatches
            num_tokens, num_seqs, num_decodes = num_tokens / pieces, num_seqs / pieces, num_decodes / pieces
            attention /= pieces
        host_s, launch_s = self._host_s, self._decode_launch_s
        # |a, b| twice, without the calls: this is where a simulation spends its time on step times.
        layers_s, head_s = self._layer_token_s * num_tokens, self._head_seq_s * num_seqs
        layers_s *= layers_s
        head_s *= head_s
        gpu_s = (
            self._fixed_s
            + sqrt(sqrt(self._layer_weights_4 + layers_s * layers_s))
            + sqrt(sqrt(self._head_weights_4 + head_s * head_s))
            + self._token_s * num_tokens
            + self._seq_s * num_seqs
        )
        if num_decodes:
            gpu_s += self._fixed_decode_s
        if num_tokens > num_decodes:
            host_s, launch_s = host_s + self._host_prefill_s, self._prefill_launch_s
            num_prefill = num_tokens - num_decodes
            gpu_s += self._fixed_prefill_s + self._attention_s * attention + self._prefill_token_s * num_prefill
            if self._window:
                gpu_s += self._windowed_attention_s * _windowed(attention, num_prefill, self._window)
        if num_tokens >= self._bulk_tokens:
            gpu_s += self._bulk_token_s * num_tokens
        if self._experts is not None:
            gpu_s += self._experts.time_s(expert_tokens)
        return host_s, launch_s, gpu_s, pieces


def _windowed(attention: float, num_tokens: float, window: int) -> float:
    """Return `attention` with every token seeing at most `window` tokens back.

    Exact for a whole prompt, for which the mean token sees half of it; a chunk after a long prefix sees the window.
    """
    mean = attention / num_tokens
    return num_tokens * (mean if 2 * mean <= window else window - window * window / (4 * mean))


def _num_products(shape: ModelShape) -> int:
    """Return the matrix products of all layers beside the routed experts and the output head.

    Attention: query-key-value and output; with a latent vector also its expansion, and one product each to go into
    the latent space and out. Feed-forward: gate and up, down. A layer with experts: the router and the shared experts.
    """
    products = shape.num_layers * (2 if shape.latent is None else 5)
    if shape.experts is None:
        return products + 2 * shape.num_layers
    dense = shape.num_layers - shape.experts.num_layers
    shared = 2 if shape.experts.shared_intermediate_size else 0
    return products + 2 * dense + shape.experts.num_layers * (1 + shared)


def _converted_width(shape: ModelShape, n: int) -> float:
    """Return the values per token that all layers convert to fp8 by kernels of their own, on each of n GPUs."""
    attention = shape.num_heads * (shape.head_dim if shape.latent is None else shape.latent.value_head_dim)
    dense, shared = shape.num_layers * shape.intermediate_size, 0
    if shape.experts is not None:
        dense = (shape.num_layers - shape.experts.num_layers) * shape.intermediate_size
        shared = shape.experts.num_layers * shape.experts.shared_intermediate_size
    return (shape.num_layers * attention + dense + shared) / n


def _kv_share(kernels: Kernels, kv_dtype: str) -> float:
    return kernels.fp8_kv_bandwidth_share if DTYPE_BYTES[kv_dtype] < 2 else kernels.kv_bandwidth_share


def _small_kernel_bytes(shape: ModelShape, n: int) -> float:
    """Return what the small kernels of a mean layer move per token on each of n GPUs.

    Norms read and write the residual and their result (8 widths in all), rotation and KV write go over query, key and
    value twice, the activation reads what one or two products wrote and writes one. What experts move is theirs.
    """
    query_key_value = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim / n
    if shape.latent is not None:
        query = shape.num_heads * (shape.latent.nope_head_dim + shape.latent.rope_head_dim)
        query_key_value = query / n + shape.latent.kv_width
    dense, shared = shape.num_layers, 0.0
    if shape.experts is not None:
        dense -= shape.experts.num_layers
        shared = 3 * shape.experts.shared_intermediate_size * shape.experts.num_layers
    activation = ((3 if shape.gated else 2) * shape.intermediate_size * dense + shared) / shape.num_layers / n
    return shape.bytes_per_value * (8 * shape.hidden_size + 2 * query_key_value + activation)
