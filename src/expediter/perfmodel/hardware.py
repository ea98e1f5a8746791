"""GPU constants, each with its source.

Sources:
    [AIC] the hardware files a100_sxm.yaml, h100_sxm.yaml and h200_sxm.yaml of AIConfigurator (NVIDIA, Apache-2.0,
        Copyright 2025-2026 NVIDIA CORPORATION & AFFILIATES): bandwidths, capacities, dense FLOP/s, the 3 us floor of a
        memory-bound kernel, the 10 us peer-to-peer latency, and the 3.5 GiB that a deployment keeps beside weights and
        KV. Figures were copied as facts, no code.
    [AIC-K] medians over the kernel tables published in the same repository (A100: vLLM 0.14.0, H100: vLLM 0.24.0;
        bfloat16). GEMM: n and k from 2,048 to 32,768; at least 2,048 tokens for the share of peak FLOP/s, one token for
        the share of peak bandwidth. Attention: 8 query heads and 1 KV head of 128 per GPU (70B on 8 GPUs); prompts of
        4,096-10,240 tokens for prefill, 64 sequences of 2,048-4,096 for decode. All-reduce: 8 GPUs, CUDA graph, up to
        1 KiB for the latency, 64 MiB for the share of link bandwidth.
    [DS] NVIDIA data sheets: A10 (2021), L40S (2023), HGX B200 (2024), dense figures without sparsity.
    Links to the host: PCIe 4.0 x16 on A100, A10 and L40S, 5.0 x16 on H100, H200 and B200 [DS].
    Where there is no kernel table, the factors are those of the nearest architecture that has one: A100's for A10 and
    L40S, H100's for H200 and B200.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from expediter.core.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """What the step-time model knows of one GPU.

    Args:
        memory_bytes: capacity.
        memory_bandwidth: peak, byte/s.
        flops: dense bfloat16 peak, FLOP/s.
        link_bandwidth: to the other GPUs of the node, byte/s in one direction.
        host_bandwidth: to the host's memory, byte/s in one direction.
        max_tensor_parallel: GPUs in a node.
        gemm_efficiency: share of `flops` that large matrix products reach.
        weight_read_efficiency: share of `memory_bandwidth` that small matrix products reach.
        prefill_attention_efficiency: share of `flops` in prefill attention.
        kv_read_efficiency: share of `memory_bandwidth` in decode attention.
        link_efficiency: share of `link_bandwidth` in large all-reduces.
        host_efficiency: share of `host_bandwidth` in large copies from and to pinned memory; assumed, not measured.
        all_reduce_latency_s: of the smallest all-reduce.
        kernel_latency_s: shortest time of any kernel, launched from a CUDA graph.
        reserved_bytes: memory that neither weights nor KV may take (runtime, activations, communication buffers).
    """

    name: str
    memory_bytes: int
    memory_bandwidth: float
    flops: float
    link_bandwidth: float
    host_bandwidth: float
    max_tensor_parallel: int = 8
    gemm_efficiency: float
    weight_read_efficiency: float
    prefill_attention_efficiency: float
    kv_read_efficiency: float
    link_efficiency: float
    host_efficiency: float = 0.8
    all_reduce_latency_s: float
    kernel_latency_s: float = 3e-6  # [AIC]
    reserved_bytes: int = 3_758_096_384  # [AIC]


_GIB: Final = 1 << 30
_PCIE_4: Final = 32e9
_PCIE_5: Final = 64e9

_A100: Final = Gpu(
    name="a100-80g",
    memory_bytes=80 * _GIB,  # [AIC], as are the next three
    memory_bandwidth=2.039e12,
    flops=312e12,
    link_bandwidth=300e9,
    host_bandwidth=_PCIE_4,
    gemm_efficiency=0.83,  # [AIC-K], as are the rest
    weight_read_efficiency=0.66,
    prefill_attention_efficiency=0.46,
    kv_read_efficiency=0.56,
    link_efficiency=0.66,
    all_reduce_latency_s=5.7e-6,
)
_H100: Final = Gpu(
    name="h100",
    memory_bytes=80 * _GIB,  # [AIC], as are the next three
    memory_bandwidth=3.35e12,
    flops=989e12,
    link_bandwidth=450e9,
    host_bandwidth=_PCIE_5,
    gemm_efficiency=0.80,  # [AIC-K], as are the rest
    weight_read_efficiency=0.74,
    prefill_attention_efficiency=0.58,
    kv_read_efficiency=0.61,
    link_efficiency=0.76,
    all_reduce_latency_s=4.7e-6,
)


def _like(
    gpu: Gpu,
    name: str,
    *,
    memory_bytes: int,
    memory_bandwidth: float,
    flops: float,
    link_bandwidth: float,
    all_reduce_latency_s: float | None = None,
) -> Gpu:
    """Return a GPU with its own constants, and the efficiency factors and the link to the host of `gpu`."""
    return Gpu(
        name=name,
        memory_bytes=memory_bytes,
        memory_bandwidth=memory_bandwidth,
        flops=flops,
        link_bandwidth=link_bandwidth,
        host_bandwidth=gpu.host_bandwidth,
        gemm_efficiency=gpu.gemm_efficiency,
        weight_read_efficiency=gpu.weight_read_efficiency,
        prefill_attention_efficiency=gpu.prefill_attention_efficiency,
        kv_read_efficiency=gpu.kv_read_efficiency,
        link_efficiency=gpu.link_efficiency,
        all_reduce_latency_s=gpu.all_reduce_latency_s if all_reduce_latency_s is None else all_reduce_latency_s,
    )


_PCIE_LATENCY_S: Final = 1e-5  # [AIC] peer-to-peer latency; no measured all-reduce over PCIe

_GPUS: Final = {
    gpu.name: gpu
    for gpu in (
        _A100,
        _H100,
        _like(  # [AIC]
            _H100, "h200", memory_bytes=141 * _GIB, memory_bandwidth=4.8e12, flops=989e12, link_bandwidth=450e9
        ),
        _like(  # [DS] 1.44 TB, 64 TB/s, 18 PFLOP/s and 14.4 TB/s NVLink (both directions) for eight
            _H100, "b200", memory_bytes=180_000_000_000, memory_bandwidth=8e12, flops=2250e12, link_bandwidth=900e9
        ),
        _like(  # [DS] PCIe 4.0 x16
            _A100,
            "l40s",
            memory_bytes=48 * _GIB,
            memory_bandwidth=864e9,
            flops=362e12,
            link_bandwidth=32e9,
            all_reduce_latency_s=_PCIE_LATENCY_S,
        ),
        _like(  # [DS] PCIe 4.0 x16
            _A100,
            "a10",
            memory_bytes=24 * _GIB,
            memory_bandwidth=600e9,
            flops=125e12,
            link_bandwidth=32e9,
            all_reduce_latency_s=_PCIE_LATENCY_S,
        ),
    )
}
GPU_NAMES: Final = tuple(sorted(_GPUS))


def gpu_named(name: str) -> Gpu:
    """Return the constants of a GPU.

    Raises:
        ConfigurationError: there is none of that name; the message lists those that exist.
    """
    if name not in _GPUS:
        raise ConfigurationError(f"no GPU {name!r}; there are: {', '.join(GPU_NAMES)}")
    return _GPUS[name]
