"""GPU constants, each with its source.

Sources:
    [AIC] the hardware files a100_sxm.yaml, h100_sxm.yaml and h200_sxm.yaml of AIConfigurator (NVIDIA, Apache-2.0,
        Copyright 2025-2026 NVIDIA CORPORATION & AFFILIATES): bandwidths in and between nodes, capacities, dense FLOP/s,
        power, the 10 us peer-to-peer latency, and the 3.5 GiB that a deployment keeps beside weights and KV. Figures
        were copied as facts, no code.
    [DS] NVIDIA data sheets: A10 (2021), A40 (2020), L40S (2023), HGX B200 (2024), dense figures without sparsity.
    [CW] CoreWeave's public list prices on demand, February 2026: a node of eight divided by eight; A40: 2024.
    [LL] Lambda's public list price on demand, 2025.
    Prices are what a stranger pays by the hour; contracts are far below. `gpu_named` takes one's own.
    Links to the host: PCIe 4.0 x16 on A100, A10, A40 and L40S, 5.0 x16 on H100, H200 and B200 [DS].
    What kernels reach (`constants.Kernels`) is fitted on tables of A100 and H100. Elsewhere it is that of the nearest
    architecture that has one: A100's for A10, A40 and L40S, H100's for H200 and B200. Experts have one table, H100's.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import isfinite
from pathlib import Path
from typing import Any, Final

from expediter.core.errors import ConfigurationError
from expediter.perfmodel.constants import Kernels, constants


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """What the step-time model knows of one GPU.

    Args:
        memory_bytes: capacity.
        memory_bandwidth: peak, byte/s.
        flops: dense bfloat16 peak, FLOP/s.
        fp8_flops, fp4_flops: dense peaks of these types; 0 where there is none, and such weights are only kept so.
        link_bandwidth: to the other GPUs of the node, byte/s in one direction.
        host_bandwidth: to the host's memory, byte/s in one direction.
        network_bandwidth: this GPU's share of its node's network, byte/s in one direction.
        network_latency_s: of a message between nodes.
        price_per_hour: US dollars for one GPU, its share of the node included.
        power_w: most that it draws, in watts.
        max_tensor_parallel: GPUs in a node.
        kernels: what single kernels reach on GPUs of its generation.
        host_efficiency: share of `host_bandwidth` in large copies from and to pinned memory; assumed, not measured.
        all_reduce_latency_s: of the smallest all-reduce.
        reserved_bytes: memory that neither weights nor KV may take (runtime, activations, communication buffers).
    Raises:
        ConfigurationError: a figure is not a finite number of its range.
    """

    name: str
    memory_bytes: int
    memory_bandwidth: float
    flops: float
    fp8_flops: float = 0.0
    fp4_flops: float = 0.0
    link_bandwidth: float
    host_bandwidth: float
    network_bandwidth: float
    network_latency_s: float = 1e-5  # [AIC] peer-to-peer latency
    price_per_hour: float
    power_w: float
    max_tensor_parallel: int = 8
    kernels: Kernels
    host_efficiency: float = 0.8
    all_reduce_latency_s: float
    reserved_bytes: int = 3_758_096_384  # [AIC]

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in {"name", "kernels"}:
                continue
            if not (isfinite(value) and (value >= 0 if field.name in _MAY_BE_ZERO else value > 0)):
                at_least = "at least 0" if field.name in _MAY_BE_ZERO else "above 0"
                raise ConfigurationError(f"GPU {self.name}: {field.name} must be {at_least}, not {value}")
        if self.host_efficiency > 1:
            raise ConfigurationError(f"GPU {self.name}: host_efficiency must be at most 1, not {self.host_efficiency}")


_MAY_BE_ZERO: Final = frozenset(
    {
        "fp8_flops",
        "fp4_flops",
        "price_per_hour",
        "power_w",
        "reserved_bytes",
        "network_latency_s",
        "all_reduce_latency_s",
    }
)

_GIB: Final = 1 << 30
_PCIE_4: Final = 32e9
_PCIE_5: Final = 64e9
_PCIE_LATENCY_S: Final = 1e-5  # [AIC] peer-to-peer latency; no measured all-reduce over PCIe

_AMPERE: Final = constants().kernels["ampere"]
_HOPPER: Final = constants().kernels["hopper"]

_ADA: Final = replace(  # products in fp8 reach the share of FLOP/s that they reach on H100, and read as on A100
    _AMPERE,
    fp8_gemm_latency_s=_AMPERE.gemm_latency_s,
    fp8_gemm_flops_share=_HOPPER.fp8_gemm_flops_share,
    fp8_gemm_bandwidth_share=_AMPERE.gemm_bandwidth_share,
)

_A100: Final = Gpu(
    name="a100-80g",
    memory_bytes=80 * _GIB,  # [AIC], as are the next three
    memory_bandwidth=2.039e12,
    flops=312e12,
    link_bandwidth=300e9,
    host_bandwidth=_PCIE_4,
    network_bandwidth=25e9,  # [AIC], as is the power
    power_w=400,
    price_per_hour=2.70,  # [CW] 21.60 for eight
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
    network_bandwidth=50e9,  # [AIC], as is the power
    power_w=700,
    price_per_hour=6.16,  # [CW] 49.24 for eight
    kernels=_HOPPER,
    all_reduce_latency_s=_HOPPER.all_reduce_latency_s,
)

_GPUS: Final = {
    gpu.name: gpu
    for gpu in (
        _A100,
        _H100,
        replace(  # [AIC] differs from H100 in memory only; [CW] 50.44 for eight
            _H100, name="h200", memory_bytes=141 * _GIB, memory_bandwidth=4.8e12, price_per_hour=6.31
        ),
        replace(
            _H100,
            name="b200",
            memory_bytes=180_000_000_000,  # [DS] for eight: 1.44 TB, 64 TB/s, bf16 18, fp8 36, fp4 72 PFLOP/s
            memory_bandwidth=8e12,
            flops=2250e12,
            fp8_flops=4500e12,
            fp4_flops=9000e12,
            link_bandwidth=900e9,  # [DS] 14.4 TB/s of NVLink for eight, both directions
            power_w=1000,  # [DS]
            price_per_hour=8.60,  # [CW] 68.80 for eight
        ),
        replace(
            _A100,
            name="l40s",
            memory_bytes=48 * _GIB,  # [DS], as are the next three and the power
            memory_bandwidth=864e9,
            flops=362e12,
            fp8_flops=733e12,
            kernels=_ADA,
            link_bandwidth=_PCIE_4,
            power_w=350,
            price_per_hour=2.25,  # [CW] 18.00 for eight
            all_reduce_latency_s=_PCIE_LATENCY_S,
        ),
        replace(
            _A100,
            name="a40",
            memory_bytes=48 * _GIB,  # [DS], as are the next two and the power
            memory_bandwidth=696e9,
            flops=149.7e12,
            link_bandwidth=_PCIE_4,
            network_bandwidth=12.5e9,  # assumed: 100 Gbit/s each
            power_w=300,
            price_per_hour=1.28,  # [CW]
            all_reduce_latency_s=_PCIE_LATENCY_S,
        ),
        replace(
            _A100,
            name="a10",
            memory_bytes=24 * _GIB,  # [DS], as are the next two and the power
            memory_bandwidth=600e9,
            flops=125e12,
            link_bandwidth=_PCIE_4,
            network_bandwidth=3.125e9,  # assumed: 100 Gbit/s for a node of four
            power_w=150,
            price_per_hour=0.75,  # [LL]
            all_reduce_latency_s=_PCIE_LATENCY_S,
        ),
    )
}
GPU_NAMES: Final = tuple(sorted(_GPUS))


def gpu_named(name: str, prices: Mapping[str, float] | None = None) -> Gpu:
    """Return the constants of a GPU, or of the one that the TOML file at that path describes.

    Such a file names a GPU that its own resembles, and what differs from it, by the fields of `Gpu`::

        name = "h100-pcie"
        like = "h100"
        memory_bandwidth = 2.04e12

    Args:
        prices: own prices per hour by GPU name.
    Raises:
        ConfigurationError: there is none of that name (the message lists those that exist), or the file is wrong.
    """
    gpu = _GPUS.get(name)
    if gpu is None:
        if not name.endswith(".toml"):
            raise ConfigurationError(f"no GPU {name!r}; there are: {', '.join(GPU_NAMES)}, or a .toml file")
        gpu = _gpu_from_toml(Path(name))
    price = (prices or {}).get(gpu.name)
    return gpu if price is None else replace(gpu, price_per_hour=price)


def _gpu_from_toml(path: Path) -> Gpu:
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigurationError(f"GPU file {path} cannot be read: {error}") from error
    like = table.pop("like", None)
    if like not in _GPUS:
        raise ConfigurationError(f"GPU file {path}: like must name the GPU it resembles, one of {', '.join(GPU_NAMES)}")
    known = {field.name: str(field.type) for field in fields(Gpu) if field.name != "kernels"}
    for key, value in table.items():
        if key not in known:
            raise ConfigurationError(f"GPU file {path}: no field {key!r}; there are: like, {', '.join(known)}")
        _check_type(path, key, value, known[key])
    return replace(_GPUS[like], **({"name": path.stem} | table))


def _check_type(path: Path, key: str, value: Any, wanted: str) -> None:  # noqa: ANN401 - whatever TOML holds
    accepted: tuple[type, ...] = {"str": (str,), "int": (int,)}.get(wanted, (int, float))
    if not isinstance(value, accepted) or isinstance(value, bool):
        raise ConfigurationError(f"GPU file {path}: {key} must be {wanted}, not {value!r}")
