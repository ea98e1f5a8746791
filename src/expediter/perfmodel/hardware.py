"""GPU constants, each with its source.

Sources:
    [AIC] the hardware files a100_sxm.yaml, h100_sxm.yaml and h200_sxm.yaml of AIConfigurator (NVIDIA, Apache-2.0,
        Copyright 2025-2026 NVIDIA CORPORATION & AFFILIATES): bandwidths, capacities, dense FLOP/s, the 10 us
        peer-to-peer latency, and the 3.5 GiB that a deployment keeps beside weights and KV. Figures were copied as
        facts, no code.
    [DS] NVIDIA data sheets: A10 (2021), L40S (2023), HGX B200 (2024), dense figures without sparsity.
    Links to the host: PCIe 4.0 x16 on A100, A10 and L40S, 5.0 x16 on H100, H200 and B200 [DS].
    What kernels reach (`constants.Kernels`) is fitted on tables of A100 and H100. Elsewhere it is that of the nearest
    architecture that has one: A100's for A10 and L40S, H100's for H200 and B200. L40S computes in fp8, but is not
    modelled so: there is no table of its generation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from expediter.core.errors import ConfigurationError
from expediter.perfmodel.constants import Kernels, constants


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """What the step-time model knows of one GPU.

    Args:
        memory_bytes: capacity.
        memory_bandwidth: peak, byte/s.
        flops: dense bfloat16 peak, FLOP/s.
        fp8_flops: dense fp8 peak, FLOP/s; 0 where there is none.
        link_bandwidth: to the other GPUs of the node, byte/s in one direction.
        host_bandwidth: to the host's memory, byte/s in one direction.
        max_tensor_parallel: GPUs in a node.
        kernels: what single kernels reach on GPUs of its generation.
        host_efficiency: share of `host_bandwidth` in large copies from and to pinned memory; assumed, not measured.
        all_reduce_latency_s: of the smallest all-reduce.
        reserved_bytes: memory that neither weights nor KV may take (runtime, activations, communication buffers).
    """

    name: str
    memory_bytes: int
    memory_bandwidth: float
    flops: float
    link_bandwidth: float
    host_bandwidth: float
    max_tensor_parallel: int = 8
    kernels: Kernels
    host_efficiency: float = 0.8
    all_reduce_latency_s: float
    fp8_flops: float = 0.0
    reserved_bytes: int = 3_758_096_384  # [AIC]


_GIB: Final = 1 << 30
_PCIE_4: Final = 32e9
_PCIE_5: Final = 64e9

_AMPERE: Final = constants().kernels["ampere"]
_HOPPER: Final = constants().kernels["hopper"]

_A100: Final = Gpu(
    name="a100-80g",
    memory_bytes=80 * _GIB,  # [AIC], as are the next three
    memory_bandwidth=2.039e12,
    flops=312e12,
    link_bandwidth=300e9,
    host_bandwidth=_PCIE_4,
    kernels=_AMPERE,
    all_reduce_latency_s=_AMPERE.all_reduce_latency_s,
)
_H100: Final = Gpu(
    name="h100",
    memory_bytes=80 * _GIB,  # [AIC], as are the next four
    memory_bandwidth=3.35e12,
    flops=989e12,
    fp8_flops=1978e12,
    link_bandwidth=450e9,
    host_bandwidth=_PCIE_5,
    kernels=_HOPPER,
    all_reduce_latency_s=_HOPPER.all_reduce_latency_s,
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
        fp8_flops=2 * flops if gpu.fp8_flops else 0.0,
        host_bandwidth=gpu.host_bandwidth,
        kernels=gpu.kernels,
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
